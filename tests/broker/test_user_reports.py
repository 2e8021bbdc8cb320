"""Faults that users of other schedulers reported, each as the right behaviour here."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta

import pytest

from airflow_gpu_provider.broker.model import CyclePolicy, RunType

from .builders import (
    NOW,
    after,
    claim,
    fleet,
    fleet_of,
    lease,
    node,
    placed,
    rejected,
    release,
    singles,
    snapshot,
    waiting,
)
from .conftest import Cycle


def test_asking_more_than_the_fleet_has_fails_in_one_cycle_with_numbers(cycle: Cycle) -> None:
    """apache/airflow#20178: pool_slots above the pool's total waits for ever."""
    (rejection,) = cycle(fleet(2, 4), [claim("big", 16)], singles(4)).rejections
    assert rejection.reason.code.value == "exceeds_fleet"
    assert rejection.reason.text == (
        "asked 16 GPUs in one gang; the fleet has 8, the largest node 4; lower gpus or add nodes"
    )


def test_never_and_not_now_are_two_outcomes(cycle: Cycle) -> None:
    """flyteorg/flyte#2933: cannot tell "not now" from "never"."""
    busy = singles(4, on="n0") + singles(4, on="n1")
    decisions = cycle(fleet(2, 4), [claim("later", 4), claim("never", 9)], busy)
    assert rejected(decisions) == {"never": "exceeds_fleet"}
    reason = waiting(decisions)["later"].reason
    assert reason.code.value == "devices_leased"
    assert (
        reason.text == "asked 4 GPUs; of 8 suitable devices 0 free, 8 leased; starts when 4 more can be had"
    )


def test_a_gang_of_high_value_is_not_overtaken_for_ever_by_singles(cycle: Cycle) -> None:
    """apache/airflow#29474: a task that needs 2 slots is overtaken by 1-slot ones."""
    gang = claim("gang", 8, value=10)
    now = snapshot(fleet(1, 8), [gang, claim("early", value=0)], singles(8))
    for ended in range(8):
        fed = replace(now, claims=(*now.claims, claim(f"fed-{ended}", value=0)))
        decisions = cycle(fed)
        assert placed(decisions) == {}, "what ends is kept for the gang"
        now = release(after(fed, decisions, NOW), f"busy-n0-{ended}")
    assert list(placed(cycle(now))) == ["gang"], "it starts as soon as the first 8 have ended"


def test_a_small_claim_may_use_held_devices_only_if_it_ends_in_time(cycle: Cycle) -> None:
    """kai-scheduler/KAI-Scheduler#1969: reservation and backfill for big gangs."""
    busy = singles(4, max_runtime_s=3600)
    small = [
        claim("short", max_runtime_s=300),
        claim("long", max_runtime_s=7200),
        claim("unsaid"),
    ]
    decisions = cycle(fleet(1, 8), [claim("gang", 8, value=5), *small], busy)
    assert list(placed(decisions)) == ["short"]
    told = waiting(decisions)
    assert told["gang"].starts_in_s == 3600
    assert told["long"].reason.code.value == "behind_head"
    assert told["unsaid"].reason.code.value == "behind_head"


@pytest.mark.parametrize("seed", range(20))
def test_two_gangs_that_need_all_devices_never_get_a_part_each(cycle: Cycle, seed: int) -> None:
    """volcano-sh/volcano#3373: two jobs needing all nodes each get a part; deadlock."""
    chance = random.Random(seed)
    claims = [claim("one", 8, value=chance.random()), claim("two", 8, value=chance.random())]
    for _ in range(5):  # 100 orders in all
        chance.shuffle(claims)
        nodes = chance.choice([1, 2, 4, 8])
        decisions = cycle(fleet(nodes, 8 // nodes), claims)
        ((_, devices),) = placed(decisions).items()
        assert len(devices) == 8
        assert len(decisions.waiting) == 1


def test_a_resume_of_twenty_tasks_at_once_leases_no_more_than_there_is(cycle: Cycle) -> None:
    """apache/airflow#69187: resuming tasks are not counted and oversubscribe the pool."""
    some = fleet(2, 4)
    before = snapshot(some, [claim(f"task-{number:02}") for number in range(20)], singles(3))
    decisions = cycle(before)
    assert len(decisions.placements) == 5
    again = cycle(after(before, decisions, NOW))
    assert placed(again) == {}
    assert len(again.waiting) == 15


def test_an_unknown_model_is_rejected_and_the_known_ones_are_listed(cycle: Cycle) -> None:
    """apache/airflow#795: a pool that does not exist hangs."""
    some = fleet_of(node("a", 2, "A100"), node("b", 4, "V100"))
    (rejection,) = cycle(some, [claim("odd", 2, "H200")]).rejections
    assert rejection.reason.code.value == "unknown_model"
    assert rejection.reason.text == (
        "asked 2 x H200; the fleet has 2 x A100, 4 x V100 and none of that model; "
        "ask for one of these models or add nodes"
    )


def test_a_pending_reason_names_the_true_first_blocker(cycle: Cycle) -> None:
    """skypilot#6921: the pending text names the wrong blocker."""
    some = fleet_of(
        node("leased", 1, "A100"),
        node("drained", 1, "V100", unavailable="drained"),
        node("busy", 1, "T4", load=0.9),
        node("hungry", 2, "L4", cpu_cores=8),
        node("failed", 1, "H100"),
    )
    leases = [lease("x", "leased/0"), lease("y", "hungry/0", cpu_cores=6)]
    claims = [
        claim("for-lease", 1, "A100"),
        claim("for-drain", 1, "V100"),
        claim("for-load", 1, "T4"),
        claim("for-cores", 1, "L4", cpu_cores=4),
        claim("for-any-of-two", 2, "A100|V100"),
        claim("for-other", 2, "H100|V100", excluded=["failed/0"]),
    ]
    decisions = cycle(some, claims, leases)
    codes = {name: each.reason.code.value for name, each in waiting(decisions).items()}
    assert codes == {
        "for-lease": "devices_leased",
        "for-drain": "devices_unavailable",
        "for-load": "nodes_busy",
        "for-cores": "host_full",
        "for-any-of-two": "devices_unavailable",
    }
    assert rejected(decisions) == {"for-other": "devices_excluded"}
    assert "1 unavailable (1 drained)" in waiting(decisions)["for-drain"].reason.text
    assert "lack 4 cores" in waiting(decisions)["for-cores"].reason.text


def test_a_thousand_claims_for_a_full_flavor_do_not_delay_ten_for_a_free_one(cycle: Cycle) -> None:
    """kubernetes-sigs/kueue#8309: strict FIFO blocks other flavors."""
    some = fleet_of(node("a", 8, "A100"), *(node(f"v{number}", 5, "V100") for number in range(2)))
    full = [claim(f"full-{number:04}", 1, "A100", value=100) for number in range(1000)]
    free = [claim(f"free-{number}", 1, "V100") for number in range(10)]
    decisions = cycle(some, full + free, singles(8, on="a"))
    assert set(placed(decisions)) == {each.id for each in free}
    assert len(decisions.waiting) == 1000


def test_a_retry_avoids_the_device_that_failed_even_before_it_is_drained(cycle: Cycle) -> None:
    """MFlowCode/MFC#1748: jobs are sent again to the node with uncorrectable ECC errors."""
    some = fleet_of(node("a", 1), node("b", 1))
    assert placed(cycle(some, [claim("retry", excluded=["a/0"])])) == {"retry": ["b/0"]}
    drained = fleet_of(node("a", 1, bad={0: "uncorrectable ECC"}), node("b", 1))
    assert placed(cycle(drained, [claim("other")])) == {"other": ["b/0"]}
    full = cycle(drained, [claim("third")], singles(1, on="b"))
    assert "1 uncorrectable ECC" in waiting(full)["third"].reason.text


def test_tasks_that_start_together_each_get_a_device_of_their_own(cycle: Cycle) -> None:
    """facebookincubator/submitit#1704: 8 tasks all run on GPU 0."""
    given = placed(cycle(fleet(2, 4), [claim(f"task-{number}") for number in range(8)]))
    assert len({device for devices in given.values() for device in devices}) == len(given) == 8


def test_a_reason_counts_what_there_is_and_lists_no_nodes(cycle: Cycle) -> None:
    """Reasons of other schedulers are a line a node: nobody reads them on a large fleet."""
    for nodes in (2, 200):
        some = fleet_of(*(node(f"n{index:03}", 4, unavailable="drained") for index in range(nodes)))
        busy = fleet_of(*some.nodes, node("live", 4))
        told = waiting(cycle(busy, [claim("gang", 8)], singles(4, on="live")))["gang"].reason
        assert told.text == (
            f"asked 8 GPUs; of {4 * nodes + 4} suitable devices 0 free, 4 leased, {4 * nodes} unavailable "
            f"({4 * nodes} drained); leased ones alone are too few: undrain or repair devices"
        )


def test_backfill_runs_below_live_work_and_is_still_lifted_by_waiting(cycle: Cycle) -> None:
    live = claim("live", value=0)
    refresh = claim("refresh", value=500, run_type=RunType.BACKFILL)
    assert list(placed(cycle(fleet(1, 1), [refresh, live]))) == ["live"]
    patient = replace(refresh, submitted_at=NOW - timedelta(minutes=501))
    policy = CyclePolicy(backfill_penalty=1000, ageing_per_min=1)
    assert list(placed(cycle(fleet(1, 1), [patient, live], policy=policy))) == ["refresh"]
