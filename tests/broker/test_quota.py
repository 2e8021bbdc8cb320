"""Teams get what they own first, and share the rest by weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.broker.model import Claim, Fleet, Lease, ReasonCode, RunType
from airflow_gpu_provider.broker.quota import FairShare, Quota, Quotas
from airflow_gpu_provider.exceptions import InvalidRequest

from .builders import claim, fleet, fleet_of, lease, node

quick = settings(max_examples=150, deadline=None)


def of(team: str | None, name: str, gpus: int = 1, model: str | None = None, **more: Any) -> Claim:
    return replace(claim(name, gpus, model, **more), team=team)


def held(team: str | None, name: str, devices: str, *, preemptible: bool = False, **more: Any) -> Lease:
    return replace(
        lease(name, devices, **more), claim=replace(claim(name), team=team, preemptible=preemptible)
    )


def order(
    claims: Iterable[Claim],
    quotas: Mapping[str, Quota],
    some: Fleet | None = None,
    leases: Iterable[Lease] = (),
) -> list[str]:
    share = FairShare(Quotas(quotas), some or fleet(2), leases)
    return [str(each.id) for each in share.ordered(claims, lambda each: each.value)]


def test_a_team_under_its_quota_goes_before_one_that_borrows_whatever_the_values() -> None:
    queue = [of("rich", "r", value=100), of("owner", "o", value=1)]
    assert order(queue, {"owner": Quota(2)}) == ["o", "r"]
    assert order(queue, {"owner": Quota(1)}, leases=[held("owner", "x", "n0/0")]) == ["r", "o"]


def test_claims_within_quotas_go_by_urgency() -> None:
    queue = [of("a", "a1", value=1), of("b", "b1", value=3), of("a", "a2", value=2)]
    assert order(queue, {"a": Quota(4), "b": Quota(4)}) == ["b1", "a2", "a1"]


def test_without_quotas_urgency_alone_decides() -> None:
    queue = [of("a", "a1", value=1), of(None, "n", value=2), of("b", "b1", value=3)]
    assert order(queue, {}, leases=[held("b", "x", "n0/0 n0/1")]) == ["b1", "n", "a1"]


def test_those_that_borrow_take_turns_by_weight() -> None:
    queue = [of(team, f"{team}{number}", value=-number) for team in ("heavy", "light") for number in range(6)]
    first = order(queue, {"heavy": Quota(weight=2), "light": Quota(weight=1)})[:6]
    assert Counter(name[:5] for name in first) == {"heavy": 4, "light": 2}


def test_the_scarcest_model_a_team_holds_most_of_is_its_share() -> None:
    some = fleet_of(node("a", 2, "A100"), node("v", 8, "V100"))
    leases = [held("few", "x", "a/0"), held("many", "y", "v/0 v/1 v/2")]
    share = FairShare(Quotas({"few": Quota()}), some, leases)
    assert (share.dominant_share("few"), share.dominant_share("many")) == (0.5, 0.375)
    assert order([of("few", "f", value=9), of("many", "m")], {"few": Quota()}, some, leases) == ["m", "f"]


def test_backfill_that_borrows_goes_below_live_work_that_borrows() -> None:
    queue = [of("a", "old", run_type=RunType.BACKFILL), of("b", "live")]
    assert order(queue, {"z": Quota(1)}, leases=[held("b", "x", "n0/0 n0/1")]) == ["live", "old"]


def test_a_share_is_one_of_the_fleet_and_parts_of_devices_count_as_parts() -> None:
    share = FairShare(Quotas({"a": Quota(share=0.25)}), fleet(2), [held("a", "x", "n0/0 n0/1", milli=500)])
    assert (share.owned("a"), share.held("a")) == (2.0, 1.0)
    assert not share.borrows(of("a", "c", 1))
    assert share.borrows(of("a", "c", 2))


def test_a_limit_keeps_a_team_from_borrowing_more_and_says_whether_waiting_helps() -> None:
    share = FairShare(Quotas({"a": Quota(2, limit=3)}), fleet(2), [held("a", "x", "n0/0 n0/1")])
    assert share.limit_reason(of("a", "one")) is None
    now, never = (share.limit_reason(of("a", "c", gpus)) for gpus in (2, 4))
    assert now is not None and never is not None
    assert now.code is ReasonCode.OVER_QUOTA
    assert now.text == "asked 2 GPUs; team a holds 2 and may have 3; starts when its team gives devices back"
    assert never.text.endswith("lower gpus or raise the team's limit")
    assert share.limit_reason(of(None, "free", 8)) is None


def test_borrowed_are_the_preemptible_and_then_the_newest_leases_above_the_quota() -> None:
    leases = [
        held("a", "oldest", "n0/0", held_s=90),
        held("a", "soft", "n0/1", held_s=60, preemptible=True),
        held("a", "newest", "n0/2", held_s=30),
        held("b", "own", "n1/0"),
    ]
    found = {
        quota: FairShare(Quotas({"a": Quota(quota), "b": Quota(1)}), fleet(2), leases).borrowed()
        for quota in (3, 2, 1)
    }
    assert found == {
        3: frozenset(),
        2: {"lease-soft"},
        1: {"lease-soft", "lease-newest"},
    }


def test_only_an_owner_reclaims_and_never_from_itself() -> None:
    leases = [held("a", "x", "n0/0 n0/1 n0/2"), held(None, "n", "n1/0")]
    share = FairShare(Quotas({"a": Quota(1), "b": Quota(2)}), fleet(2), leases)
    assert share.reclaimable(of("b", "c", 2)) == {"lease-x", "lease-n"}
    assert share.reclaimable(of("b", "c", 3)) == frozenset(), "above its own quota it owns nothing to reclaim"
    assert share.reclaimable(of(None, "c")) == frozenset()
    assert FairShare(Quotas(), fleet(2), leases).reclaimable(of("b", "c")) == frozenset()


def test_what_other_teams_hold_within_their_quotas_is_protected_and_what_they_borrow_is_not() -> None:
    leases = [held("a", "own", "n0/0", held_s=60), held("a", "more", "n0/1"), held(None, "n", "n1/0")]
    share = FairShare(Quotas({"a": Quota(1), "b": Quota(2)}), fleet(2), leases)
    assert share.protected(of("b", "c")) == {"lease-own"}
    assert share.protected(of("a", "c")) == frozenset(), "within a team, value decides"
    assert FairShare(Quotas(), fleet(2), leases).protected(of("b", "c")) == frozenset()


def test_events_lead_to_what_the_leases_alone_would() -> None:
    first, second = held("a", "x", "n0/0 n0/1"), held("b", "y", "n1/0", milli=500)
    quotas = Quotas({"a": Quota(1)})
    share = FairShare(quotas, fleet(2), [first])
    assert share.borrowed() == {"lease-x"}
    share.hold(second)
    share.hold(replace(first, devices=first.devices[:1]))
    share.count(of("a", "soon", 2))
    assert share.held("a") == 3
    share.assume_nothing()
    fresh = FairShare(quotas, fleet(2), [replace(first, devices=first.devices[:1]), second])
    for team in ("a", "b"):
        assert (share.held(team), share.dominant_share(team)) == (
            fresh.held(team),
            fresh.dominant_share(team),
        )
    assert share.borrowed() == fresh.borrowed() == {"lease-y"}
    share.drop(second.id)
    share.drop(second.id)
    assert (share.held("b"), share.borrowed()) == (0, frozenset())


def test_quotas_are_read_from_json() -> None:
    assert Quotas.parse(" ") == Quotas()
    text = '{"vision": {"devices": 8, "weight": 2}, "text": {"share": 0.25, "limit": 16}}'
    assert Quotas.parse(text) == Quotas({"vision": Quota(8, weight=2), "text": Quota(share=0.25, limit=16)})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object by team"),
        ('{"a": 3}', "quota of team 'a' is 3"),
        ('{"a": {"gpus": 3}}', "devices, limit, share, weight"),
        ('{"a": {"weight": 0}}', "weight of team 'a' is 0: write 0 or more, and a weight above 0"),
        ('{"a": {"devices": true}}', "devices of team 'a' is True"),
        ('{"a": {"devices": -1}}', "devices of team 'a' is -1"),
        ('{"a": {"share": 2}}', "the whole fleet is 1"),
        ('{"a": {"share": 0.5, "devices": 1}}', "give one of them"),
        ('{"a": {"share": 0.6}, "b": {"share": 0.6}}', "add up to 1.2"),
    ],
)
def test_wrong_quotas_are_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Quotas.parse(text)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Fleet, dict[str, Quota], list[Claim]]:
    """Teams whose quotas fit a fleet of one model, and claims for single devices."""
    gpus = draw(st.integers(4, 16))
    teams = draw(st.lists(st.sampled_from("abcd"), min_size=2, max_size=4, unique=True))
    left, quotas = gpus, {}
    for team in teams:
        own = draw(st.integers(0, left))
        left -= own
        quotas[team] = Quota(own, weight=draw(st.sampled_from([0.5, 1.0, 2.0, 3.0])))
    claims = [
        of(team, f"{team}{number}", value=draw(st.integers(0, 5)))
        for team in teams
        for number in range(draw(st.integers(0, 2 * gpus)))
    ]
    return fleet(1, gpus), quotas, claims


def _granted(some: Fleet, quotas: Mapping[str, Quota], claims: list[Claim]) -> Counter[str | None]:
    gpus = len(some.nodes[0].devices)
    return Counter(
        each.team for each in FairShare(Quotas(quotas), some, []).ordered(claims, lambda c: c.value)[:gpus]
    )


@given(world=worlds())
@quick
def test_every_team_gets_its_quota_or_all_it_asks(world: tuple[Fleet, dict[str, Quota], list[Claim]]) -> None:
    some, quotas, claims = world
    got, demand = _granted(some, quotas, claims), Counter(each.team for each in claims)
    for team, quota in quotas.items():
        assert got[team] >= min(demand[team], quota.devices)


@given(world=worlds())
@quick
def test_what_is_borrowed_is_shared_by_weight_within_one_device(
    world: tuple[Fleet, dict[str, Quota], list[Claim]],
) -> None:
    some, quotas, claims = world
    got, demand = _granted(some, quotas, claims), Counter(each.team for each in claims)
    for rich, of_rich in quotas.items():
        for poor, of_poor in quotas.items():
            if got[rich] > of_rich.devices and got[poor] < demand[poor]:
                # The rich one borrowed its last device when its share for its weight was the least.
                assert (got[rich] - 1) / of_rich.weight <= got[poor] / of_poor.weight + 1e-9


@given(world=worlds(), held_by=st.lists(st.sampled_from(["a", "b", "c", "d", None]), max_size=4))
@quick
def test_order_loses_and_doubles_no_claim_and_what_is_reclaimed_is_never_reclaimed_back(
    world: tuple[Fleet, dict[str, Quota], list[Claim]], held_by: list[str | None]
) -> None:
    some, quotas, claims = world
    leases = [held(team, f"l{number}", f"n0/{number}") for number, team in enumerate(held_by)]
    share = FairShare(Quotas(quotas), some, leases)
    for each in claims[:5]:
        taken = share.reclaimable(each)
        if taken:
            kept = [one for one in leases if one.id not in taken]
            mine = replace(lease("mine", "n0/0"), claim=each)
            assert "lease-mine" not in FairShare(Quotas(quotas), some, [*kept, mine]).borrowed()
    told = share.ordered(claims, lambda each: each.value)
    assert Counter(each.id for each in told) == Counter(each.id for each in claims)
