"""Teams get what they own first, and share the rest by weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.fair_share import FairShare
from airflow_gpu_provider.broker.model import Claim, CyclePolicy, Fleet, Lease, LeaseId, ReasonCode, RunType
from airflow_gpu_provider.broker.order import in_order
from airflow_gpu_provider.broker.quota import Quota, Quotas
from airflow_gpu_provider.broker.rank import Rank, ranked

from .builders import NOW, TTL, claim, fleet, fleet_of, lease, node

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
    return [str(each.id) for each in told(claims, share)]


def told(claims: Iterable[Claim], share: FairShare) -> list[Claim]:
    """Return the claims in their order, ranked by value alone."""
    policy = CyclePolicy(ageing_per_min=0, backfill_penalty=0)
    lines: dict[tuple[object, ...], list[tuple[Rank, Claim]]] = {}
    for place, each in ranked(claims, NOW, policy):
        line = lines.setdefault((each.team, each.run_type, each.request), [])
        line.append((place, each))
    return list(in_order(lines.values(), share))


def test_a_team_under_its_quota_goes_before_one_that_borrows_whatever_the_values() -> None:
    queue = [of("rich", "r", value=100), of("owner", "o", value=1)]
    assert order(queue, {"owner": Quota(2)}) == ["o", "r"]
    assert order(queue, {"owner": Quota(1)}, leases=[held("owner", "x", "n0/0")]) == ["r", "o"]


def test_claims_within_quotas_go_by_value() -> None:
    queue = [of("a", "a1", value=1), of("b", "b1", value=3), of("a", "a2", value=2)]
    assert order(queue, {"a": Quota(4), "b": Quota(4)}) == ["b1", "a2", "a1"]


def test_without_quotas_value_alone_decides() -> None:
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
    assert share.protected(of("b", "c"), leases) == {"lease-own"}
    assert share.protected(of("a", "c"), leases) == frozenset(), "within a team, value decides"
    assert FairShare(Quotas(), fleet(2), leases).protected(of("b", "c"), leases) == frozenset()


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
    return Counter(each.team for each in told(claims, FairShare(Quotas(quotas), some))[:gpus])


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
    assert Counter(each.id for each in told(claims, share)) == Counter(each.id for each in claims)


@given(
    world=worlds(),
    limits=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 6), max_size=2),
    ends=st.lists(st.lists(st.integers(0, 15), max_size=6), min_size=1, max_size=6),
)
@quick
def test_from_turn_to_turn_shares_stay_within_their_bounds(
    world: tuple[Fleet, dict[str, Quota], list[Claim]],
    limits: dict[str, int],
    ends: list[list[int]],
) -> None:
    """Owners are served before anybody borrows, borrowers by weight, and nobody gets above its limit."""
    some, quotas, claims = world
    quotas = {team: replace(quota, limit=limits.get(team)) for team, quota in quotas.items()}
    engine = Engine(CyclePolicy(), some, claims=claims, quotas=Quotas(quotas))
    waits, held_now = {each.id: each for each in claims}, dict[LeaseId, Claim]()
    for ending in ends:
        for number in sorted({each % len(held_now) for each in ending} if held_now else (), reverse=True):
            lease_id = list(held_now)[number]
            del held_now[lease_id]
            engine.end(lease_id)
        before = Counter(each.team for each in held_now.values())
        for placement in engine.turn(NOW).placements:
            mine = waits.pop(placement.claim_id)
            granted = Lease(
                LeaseId(mine.id), mine.id, placement.devices, mine.request, NOW, NOW + TTL, claim=mine
            )
            engine.granted(placement, granted)
            held_now[granted.id] = mine
        assert engine.turn(NOW).placements == (), "all that can start has started"
        _check_bounds(quotas, before, Counter(each.team for each in held_now.values()), waits.values())
        engine.validate()


def _check_bounds(
    quotas: Mapping[str, Quota],
    before: Counter[str | None],
    after: Counter[str | None],
    waits: Iterable[Claim],
) -> None:
    """All claims are for one device, so that numbers of claims are numbers of devices."""

    def has_room(team: str) -> bool:
        limit = quotas[team].limit
        return limit is None or after[team] < limit

    assert all(after[team] <= (quota.limit or sum(after.values())) for team, quota in quotas.items())
    hungry = {str(each.team) for each in waits if has_room(str(each.team))}
    for rich, of_rich in quotas.items():
        if after[rich] <= max(before[rich], of_rich.devices):
            continue  # it has borrowed nothing in this turn
        for poor in hungry - {rich}:
            assert after[poor] >= quotas[poor].devices, f"{rich} borrowed what {poor} owns"
            assert (after[rich] - 1) / of_rich.weight <= after[poor] / quotas[poor].weight + 1e-9
