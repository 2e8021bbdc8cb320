from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from airflow_gpu_provider.broker.model import CyclePolicy, RunType
from airflow_gpu_provider.broker.rank import ranked

from .builders import (
    NOW,
    after,
    claim,
    fleet,
    fleet_of,
    lease,
    node,
    placed,
    release,
    singles,
    snapshot,
    waiting,
)
from .conftest import Cycle

POLICY = CyclePolicy()


def order_of(*claims: object, policy: CyclePolicy = POLICY) -> list[str]:
    return [each.id for _, each in ranked(claims, NOW, policy)]  # type: ignore[arg-type]


# -- order
def test_higher_value_goes_first_and_backfill_last() -> None:
    claims = [
        claim("low", value=1),
        claim("refresh", value=50, run_type=RunType.BACKFILL),
        claim("high", value=9),
    ]
    assert order_of(*claims) == ["high", "low", "refresh"]


def test_waiting_lifts_a_claim() -> None:
    new, old = claim("new", value=5), claim("old", value=0, waited_min=251)
    assert order_of(new, old) == ["old", "new"]
    assert order_of(new, old, policy=CyclePolicy(ageing_per_min=0)) == ["new", "old"]


def test_among_equals_less_work_goes_first_and_waiting_makes_up_for_it() -> None:
    hour = claim("hour", max_runtime_s=3600)
    quarter = claim("quarter", max_runtime_s=900)
    pair = claim("pair", 2, max_runtime_s=900)
    half = claim("half", milli=500, max_runtime_s=900)
    unsaid = claim("unsaid")
    assert order_of(unsaid, hour, pair, quarter, half) == ["half", "quarter", "pair", "hour", "unsaid"]
    patient = replace(hour, submitted_at=NOW - timedelta(minutes=101))  # two doublings, 50 minutes each
    assert order_of(quarter, patient) == ["hour", "quarter"]
    assert order_of(claim("worth", value=9), quarter) == ["worth", "quarter"], "value counts for more"
    in_order = CyclePolicy(small_first=0)
    earlier = replace(hour, submitted_at=NOW - timedelta(seconds=1))
    assert order_of(quarter, earlier, policy=in_order) == ["hour", "quarter"]


def test_equal_claims_go_by_time_then_id() -> None:
    later = replace(claim("a"), submitted_at=NOW + timedelta(seconds=1))
    still = CyclePolicy(ageing_per_min=0)
    assert order_of(later, claim("c"), claim("b"), policy=still) == ["b", "c", "a"]


def test_a_clock_that_runs_ahead_makes_no_claim_less_urgent_than_new() -> None:
    ahead = replace(claim("ahead", value=1), submitted_at=NOW + timedelta(hours=9))
    assert order_of(claim("now"), ahead) == ["ahead", "now"]


def test_positions_count_those_who_wait(cycle: Cycle) -> None:
    claims = [claim("first", value=3), claim("second", value=2), claim("third", value=1)]
    told = waiting(cycle(fleet(1, 1), claims))
    assert {name: each.position for name, each in told.items()} == {"second": 1, "third": 2}


# -- holds
def test_free_devices_that_a_blocked_claim_could_use_are_held(cycle: Cycle) -> None:
    decisions = cycle(fleet(2, 4), [claim("gang", 8, value=9), claim("single")], singles(1))
    assert placed(decisions) == {}
    told = waiting(decisions)
    assert told["gang"].reason.code.value == "devices_leased"
    assert told["single"].reason.code.value == "behind_head"
    assert "0 free, 1 leased, 7 held for a claim ahead" in told["single"].reason.text


def test_devices_that_a_blocked_claim_cannot_use_are_not_held(cycle: Cycle) -> None:
    some = fleet_of(node("a", 2, "A100"), node("v", 2, "V100"), node("h", 2, "A100", host="other"))
    claims = [
        claim("gang", 2, "A100", host="a", value=9),
        claim("v", 2, "V100"),
        claim("elsewhere", 2, "A100"),
    ]
    assert set(placed(cycle(some, claims, singles(1, on="a")))) == {"v", "elsewhere"}


def test_a_claim_that_waits_for_a_drained_device_idles_nothing(cycle: Cycle) -> None:
    some = fleet_of(node("a", 4, bad={0: "drained"}))
    decisions = cycle(some, [claim("gang", 4, value=9), claim("single")])
    assert list(placed(decisions)) == ["single"]
    assert waiting(decisions)["gang"].reason.code.value == "devices_unavailable"


def test_a_claim_that_waits_for_many_cores_is_not_starved_by_small_ones(cycle: Cycle) -> None:
    some = fleet_of(node("a", 8, cpu_cores=32))
    big = claim("big", 1, cpu_cores=24, value=9)
    state = snapshot(some, [big], [lease(f"old-{n}", f"a/{n}", cpu_cores=4) for n in range(5)])
    for ended in range(3):
        fed = replace(state, claims=(*state.claims, claim(f"fed-{ended}", cpu_cores=4)))
        decisions = cycle(fed)
        assert placed(decisions) == {}
        state = release(after(fed, decisions, NOW), f"old-{ended}")
    assert "big" in placed(cycle(state))


def test_a_whole_device_is_not_starved_by_shares(cycle: Cycle) -> None:
    shared = [lease("x", "n0/0", milli=500)]
    decisions = cycle(fleet(1, 1), [claim("whole", value=9), claim("share", milli=500)], shared)
    assert placed(decisions) == {}
    assert waiting(decisions)["share"].reason.code.value == "behind_head"


def test_cores_of_a_node_are_kept_only_as_far_as_ending_leases_do_not_bring_them(cycle: Cycle) -> None:
    some = fleet_of(node("m", models=["A100", "V100"], cpu_cores=8))
    busy = [lease("x", "m/0", cpu_cores=4, max_runtime_s=60)]
    claims = [claim("head", 1, "A100", cpu_cores=4, value=9), claim("other", 1, "V100", cpu_cores=4)]
    assert list(placed(cycle(some, claims, busy))) == ["other"]
    greedy = [claim("head", 1, "A100", cpu_cores=5, value=9), claim("other", 1, "V100", cpu_cores=4)]
    assert placed(cycle(some, greedy, busy)) == {}


def test_of_those_who_compete_only_the_first_keeps_devices_idle(cycle: Cycle) -> None:
    some = fleet_of(node("a", 4, "A100"), node("v", 4, "V100"))
    busy = singles(1, on="a") + singles(1, on="v")
    first, single = claim("first", 4, "A100", value=99), claim("single", 1, "V100")
    second = claim("second", 4, "A100|V100", value=50)
    decisions = cycle(some, [first, second, single], busy)
    assert list(placed(decisions)) == ["single"]
    assert waiting(decisions)["first"].reason.code.value == "devices_leased"
    alone = cycle(some, [first, claim("other", 4, "V100", value=50), single], busy)
    assert placed(alone) == {}, "who waits for other devices keeps his own"


# -- expected start
def test_the_expected_start_follows_from_what_holders_promised(cycle: Cycle) -> None:
    busy = [
        lease("x", "n0/0", held_s=100, max_runtime_s=400),
        lease("y", "n0/1", held_s=100, max_runtime_s=1000),
    ]
    told = waiting(cycle(fleet(1, 2), [claim("one", value=9), claim("two")], busy))
    assert told["one"].starts_in_s == 300
    assert told["two"].starts_in_s == 900


def test_a_follower_counts_on_what_the_claim_ahead_promises(cycle: Cycle) -> None:
    busy = singles(1, max_runtime_s=60)
    told = waiting(cycle(fleet(1, 1), [claim("one", value=9, max_runtime_s=30), claim("two")], busy))
    assert told["two"].starts_in_s == 90
    silent = waiting(cycle(fleet(1, 1), [claim("one", value=9), claim("two")], busy))
    assert silent["one"].starts_in_s == 60
    assert silent["two"].starts_in_s is None


def test_without_a_promise_the_start_is_unknown_and_nobody_passes(cycle: Cycle) -> None:
    busy = [*singles(1), *singles(1, first=1, max_runtime_s=60)]
    claims = [claim("gang", 4, value=99), claim("quick", max_runtime_s=1)]
    decisions = cycle(fleet(1, 4), claims, busy)
    assert placed(decisions) == {}
    assert waiting(decisions)["gang"].starts_in_s is None


def test_a_broken_promise_is_no_promise(cycle: Cycle) -> None:
    overdue = [lease("x", "n0/0", held_s=100, max_runtime_s=60)]
    assert waiting(cycle(fleet(1, 1), [claim("one")], overdue))["one"].starts_in_s is None


def test_a_claim_placed_in_this_cycle_counts_for_the_start_of_others(cycle: Cycle) -> None:
    told = waiting(cycle(fleet(1, 1), [claim("runs", value=9, max_runtime_s=45), claim("waits")]))
    assert told["waits"].starts_in_s == 45


def test_those_who_pass_a_head_pass_every_head_whose_devices_they_take(cycle: Cycle) -> None:
    some = fleet_of(node("a", 4, "A100"), node("v", 4, "V100"))
    busy = singles(1, on="a", max_runtime_s=100) + singles(1, on="v", max_runtime_s=1000)
    claims = [
        claim("gang-a", 4, "A100", value=9),
        claim("gang-v", 4, "V100", value=8),
        claim("wide", 6, "A100|V100", max_runtime_s=500),
        claim("v-only", 3, "V100", max_runtime_s=500),
    ]
    assert list(placed(cycle(some, claims, busy))) == ["v-only"]
