"""Who measures whom."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.broker.peers import Peers, Station, of_gang, rounds_of


@st.composite
def fleets(draw: st.DrawFn) -> list[Station]:
    places = draw(
        st.lists(st.tuples(st.sampled_from(["a", "b", ""]), st.sampled_from(["1", "2", ""])), max_size=60)
    )
    return [
        Station(f"n{number}", {name: value for name, value in (("zone", zone), ("rack", rack)) if value})
        for number, (zone, rack) in enumerate(places)
    ]


@settings(max_examples=60, deadline=None)
@given(fleets(), st.integers(0, 2**31))
def test_both_nodes_of_a_pair_ask_in_the_same_round_and_few_are_asked(
    fleet: list[Station], number: int
) -> None:
    peers = Peers(fleet)
    asked = {each.name: peers.of(each.name, number) for each in fleet}
    for name, others in asked.items():
        assert name not in others and len(others) <= 16
        assert all(name in asked[other] for other in others)


@settings(max_examples=60, deadline=None)
@given(fleets(), st.integers(0, 2**31))
def test_every_pair_of_a_rack_and_of_a_zone_is_measured_in_bounded_time(
    fleet: list[Station], first: int
) -> None:
    peers, groups = Peers(fleet), {}
    for each in fleet:
        zone, rack = each.labels.get("zone"), each.labels.get("rack")
        groups.setdefault((zone,), []).append(each.name)
        if rack:
            groups.setdefault((zone, rack), []).append(each.name)
    for group in groups.values():
        numbers = range(first, first + rounds_of(len(group)))
        seen = {name: frozenset().union(*(peers.of(name, number) for number in numbers)) for name in group}
        assert all(other in seen[one] for one, other in combinations(group, 2))


def test_a_thousand_nodes_without_labels_have_measured_one_another_within_thirteen_minutes() -> None:
    assert rounds_of(1000) * 6 <= 13 * 60


def test_the_nodes_of_a_gang_always_ask_one_another() -> None:
    assert of_gang(("c", "a", "b"), "b") == {"a", "c"}
    large = [f"n{number:03d}" for number in range(100)]
    asked = {name: of_gang(large, name) for name in large}
    assert all(len(others) == 32 and all(name in asked[o] for o in others) for name, others in asked.items())
