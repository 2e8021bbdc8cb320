"""Where the relay sits and how the ring runs, for any latencies."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.training.ring import matrix_of, relay_of, ring_order, worst_hop

_WAY = st.one_of(st.none(), st.integers(0, 50).map(float))


def matrices(largest: int) -> st.SearchStrategy[list[list[float | None]]]:
    return st.integers(0, largest).flatmap(
        lambda size: st.lists(st.lists(_WAY, min_size=size, max_size=size), min_size=size, max_size=size)
    )


def known(latency: list[list[float | None]]) -> list[list[float]]:
    """Return the worse of both ways; what is not known is as bad as the worst that is."""
    n = range(len(latency))
    both = [
        [max((w for w in (latency[a][b], latency[b][a]) if w is not None), default=None) for b in n]
        for a in n
    ]
    worst = max((both[a][b] for a in n for b in n if a != b and both[a][b] is not None), default=0.0)
    return [[worst if both[a][b] is None else both[a][b] for b in n] for a in n]


def cost(ways: list[list[float]], order: tuple[int, ...]) -> tuple[float, float]:
    hops = [(a, b) for a, b in zip(order, order[1:] + order[:1], strict=True) if a != b]
    hops = hops[:1] if len(order) == 2 else hops
    return max((ways[a][b] for a, b in hops), default=0.0), sum(ways[a][b] for a, b in hops)


@settings(max_examples=80, deadline=None)
@given(matrices(6))
def test_a_small_ring_is_the_best_there_is(latency: list[list[float | None]]) -> None:
    ways, order = known(latency), ring_order(latency)
    assert sorted(order) == list(range(len(latency)))
    assert cost(ways, order) == min(cost(ways, each) for each in permutations(range(len(latency))))


@settings(max_examples=40, deadline=None)
@given(matrices(24))
def test_a_large_ring_is_never_worse_than_the_given_order_and_begins_at_the_relay(
    latency: list[list[float | None]],
) -> None:
    ways, order = known(latency), ring_order(latency)
    assert sorted(order) == list(range(len(latency)))
    assert cost(ways, order) <= cost(ways, tuple(range(len(latency))))
    if order:
        assert order[0] == relay_of(latency)


def test_two_rings_of_near_members_are_joined_where_it_must_be() -> None:
    """Twelve members in two halls: 1 ms within one, 20 ms between; the given order goes to and fro."""
    latency = [[0.0 if a == b else 1.0 if a % 2 == b % 2 else 20.0 for b in range(12)] for a in range(12)]
    order = ring_order(latency)
    crossings = sum(a % 2 != b % 2 for a, b in zip(order, order[1:] + order[:1], strict=True))
    assert crossings == 2


def test_the_relay_is_where_the_latency_to_all_others_is_lowest() -> None:
    latency = matrix_of(["far", "mid", "near"], {"mid": {"far": 5.0, "near": 1.0}, "far": {"near": 9.0}})
    assert relay_of(latency) == 1 and ring_order(latency)[0] == 1
    assert worst_hop(latency) == 9.0


def test_a_ring_with_a_hop_that_nobody_measured_has_no_worst_hop() -> None:
    assert worst_hop([[0.0, 1.0, None], [1.0, 0.0, 1.0], [None, 1.0, 0.0]]) is None
    assert worst_hop([[0.0]]) is None
