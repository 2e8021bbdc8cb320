"""Work is taken back only where it may be, as little as will do, and never in turns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.broker.capacity import Capacity, part_of_lease
from airflow_gpu_provider.broker.fair_share import FairShare
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.matching import candidates
from airflow_gpu_provider.broker.model import Claim, ClaimId, Fleet, Lease, LeaseId, RunType
from airflow_gpu_provider.broker.preemption import (
    Fits,
    Preemption,
    Rights,
    after_preemption,
    fits_without,
    least_enough,
    loss_s,
    plan,
)
from airflow_gpu_provider.broker.preemption_policy import PreemptionPolicy
from airflow_gpu_provider.broker.quota import Quota, Quotas

from .builders import NOW, claim, fleet, fleet_of, lease, node

quick = settings(max_examples=150, deadline=None)
POLICY = PreemptionPolicy()


def running(
    name: str,
    devices: str,
    *,
    ran_s: float = 3600,
    saved_s: float | None = None,
    value: float = 0,
    preemptible: bool = True,
    preemptions: int = 0,
    team: str | None = None,
    run_type: RunType = RunType.LIVE,
    **of_request: Any,
) -> Lease:
    """``saved_s`` is the age of the last checkpoint."""
    whose = replace(
        claim(name),
        value=value,
        preemptible=preemptible,
        preemptions=preemptions,
        team=team,
        run_type=run_type,
    )
    saved = None if saved_s is None else NOW - timedelta(seconds=saved_s)
    return replace(lease(name, devices, held_s=ran_s, **of_request), claim=whose, checkpoint_at=saved)


def fits_on(some: Fleet, leases: Iterable[Lease], blocked: Claim) -> Fits:
    layout = Layout.of(some)
    capacity = Capacity.idle(layout, max_load=0.5)
    capacity.take_all([part_of_lease(layout, each) for each in leases])
    return fits_without(capacity, blocked.request, candidates(layout, blocked.request).devices)


def taken(
    some: Fleet,
    leases: Sequence[Lease],
    blocked: Claim,
    rights: Rights | None = None,
    policy: PreemptionPolicy = POLICY,
) -> Preemption | None:
    return plan(blocked, leases, fits_on(some, leases, blocked), NOW, policy, rights=rights or Rights())


def victims(found: Preemption | None) -> list[str]:
    return [] if found is None else [name.removeprefix("lease-") for name in found.victims]


def urgent(gpus: int = 1, **more: Any) -> Claim:
    return claim("urgent", gpus, value=more.pop("value", 9), **more)


def test_the_lease_with_the_least_work_since_its_checkpoint_is_taken() -> None:
    leases = [
        running("long-unsaved", "n0/0"),
        running("just-saved", "n0/1", saved_s=10),
        running("saved", "n0/2", saved_s=300),
        running("short", "n0/3", ran_s=400),
    ]
    found = taken(fleet(1), leases, urgent())
    assert victims(found) == ["just-saved"]
    assert found is not None
    assert (found.loss_s, found.end_by) == (10.0, NOW + timedelta(seconds=30))
    assert found.reason == (
        "taken back for claim urgent: 1 lease(s) with 1 device(s), worth at most 0 against 9; "
        "10 device-seconds since the last checkpoints are lost; they have 30 s to write one"
    )
    assert victims(taken(fleet(1), leases, urgent(2))) == ["just-saved", "saved"]


@pytest.mark.parametrize(
    "untouchable",
    [
        {"preemptible": False},
        {"value": 9},
        {"value": 10},
        {"ran_s": 299},
        {"preemptions": 3},
    ],
)
def test_who_may_not_be_taken_is_not(untouchable: dict[str, Any]) -> None:
    assert taken(fleet(1, 1), [running("x", "n0/0", **untouchable)], urgent()) is None
    assert taken(fleet(1, 1), [running("x", "n0/0")], urgent()) is not None


def test_a_lease_whose_claim_is_unknown_is_left_alone() -> None:
    assert taken(fleet(1, 1), [lease("x", "n0/0", held_s=3600)], urgent()) is None


def test_waiting_long_makes_nobody_worth_more_and_a_backfill_is_worth_less() -> None:
    leases = [running("x", "n0/0", value=5)]
    assert taken(fleet(1, 1), leases, urgent(value=5, waited_min=10_000)) is None
    refresh = [running("x", "n0/0", value=500, run_type=RunType.BACKFILL)]
    assert victims(taken(fleet(1, 1), refresh, urgent(value=1))) == ["x"]


def test_nothing_is_taken_when_that_would_not_be_enough_or_nothing_is_needed() -> None:
    leases = [running("soft", "n0/0"), running("firm", "n0/1", preemptible=False)]
    assert taken(fleet(1, 2), leases, urgent(2)) is None
    assert taken(fleet(1, 3), leases, urgent(1)) is None, "one device is free"


def test_leases_that_already_end_for_the_claim_are_not_joined_by_more() -> None:
    ending = replace(running("a", "n0/0"), ends_for=ClaimId("urgent"))
    for_other = replace(running("b", "n0/1"), ends_for=ClaimId("other"))
    leases = [ending, for_other, running("c", "n0/2")]
    assert taken(fleet(1, 3), leases, urgent(1)) is None
    assert victims(taken(fleet(1, 3), leases, urgent(2))) == ["c"]
    assert taken(fleet(1, 3), leases, urgent(3)) is None, "what ends for another is its own"


def test_a_victim_may_not_take_back_from_the_one_it_was_preempted_for() -> None:
    victim = after_preemption(replace(claim("victim", value=1), preemptible=True), ClaimId("urgent"))
    assert (victim.preemptions, victim.preempted_by) == (1, {"urgent"})
    now_running = [running("urgent", "n0/0", value=0)]
    richer = replace(victim, value=99)
    assert taken(fleet(1, 1), now_running, richer) is None
    assert taken(fleet(1, 1), now_running, replace(richer, preempted_by=frozenset())) is not None


def test_work_preempted_as_often_as_its_budget_runs_on_apart_from_its_retries() -> None:
    work = replace(claim("work"), preemptible=True)
    for number in range(POLICY.budget):
        assert work.preemptions == number
        held = replace(lease("work", "n0/0", held_s=3600), claim=work)
        assert victims(taken(fleet(1, 1), [held], urgent())) == ["work"]
        work = after_preemption(work, ClaimId(f"other{number}"))
    assert taken(fleet(1, 1), [replace(lease("work", "n0/0", held_s=3600), claim=work)], urgent()) is None


def test_one_large_lease_is_taken_rather_than_many_that_lose_more_together() -> None:
    leases = [
        running("wide", "n0/0 n0/1 n0/2 n0/3", saved_s=10),
        *(running(f"s{number}", f"n1/{number}", saved_s=11) for number in range(4)),
    ]
    assert victims(taken(fleet(2), leases, urgent(4))) == ["wide"]
    assert victims(taken(fleet(2), leases, urgent(1))) == ["s0"]


def test_one_node_is_emptied_where_cores_of_one_node_are_needed() -> None:
    some = fleet_of(node("a", 4, cpu_cores=4), node("b", 4, cpu_cores=4))
    leases = [
        running("a0", "a/0", saved_s=5, cpu_cores=2),
        running("a1", "a/1", saved_s=400, cpu_cores=2),
        running("b0", "b/0", saved_s=100, cpu_cores=2),
        running("b1", "b/1", saved_s=100, cpu_cores=2),
    ]
    assert victims(taken(some, leases, urgent(1, cpu_cores=4))) == ["b0", "b1"]


def test_an_owner_reclaims_what_was_borrowed_whatever_it_is_worth_but_nothing_within_a_quota() -> None:
    leases = [
        running("old", "n0/0", team="a", value=50, preemptible=False, ran_s=7200),
        running("new", "n0/1", team="a", value=50, preemptible=False),
    ]
    quotas = Quotas({"a": Quota(1), "b": Quota(1)})

    def rights(blocked: Claim) -> Rights:
        share = FairShare(quotas, fleet(1, 2), leases)
        return Rights(share.reclaimable(blocked), share.protected(blocked, leases))

    owner = replace(urgent(value=0), team="b")
    found = taken(fleet(1, 2), leases, owner, rights(owner))
    assert victims(found) == ["new"]
    assert found is not None and "1 borrowed from the quota of team b" in found.reason
    soft = [replace(each, claim=replace(each.claim, preemptible=True)) for each in leases if each.claim]
    stranger = replace(urgent(2, value=99), team="c")
    assert taken(fleet(1, 2), soft, stranger, rights(stranger)) is None, "one of the two is within a's quota"


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Fleet, list[Lease], Claim]:
    some = fleet_of(*(node(f"n{number}", 3, cpu_cores=6) for number in range(draw(st.integers(1, 3)))))
    free = [[device.id for device in each.devices] for each in some.nodes]
    leases = []
    for number in range(draw(st.integers(1, 7))):
        places = draw(st.sampled_from(free))
        size = draw(st.integers(1, 3))
        if len(places) < size:
            continue
        names, places[:] = places[:size], places[size:]
        leases.append(
            running(
                f"l{number}",
                " ".join(names),
                saved_s=draw(st.integers(0, 50)),
                value=draw(st.integers(0, 9)),
                preemptible=draw(st.sampled_from([True, True, False])),
                cpu_cores=draw(st.sampled_from([0, 1, 2])),
            )
        )
    return (
        some,
        leases,
        urgent(
            draw(st.integers(1, 5)), value=draw(st.integers(0, 9)), cpu_cores=draw(st.sampled_from([0, 2, 6]))
        ),
    )


@given(world=fleets())
@quick
def test_what_is_taken_is_enough_no_part_of_it_is_and_all_of_it_may_be(
    world: tuple[Fleet, list[Lease], Claim],
) -> None:
    some, leases, blocked = world
    found, fits = taken(some, leases, blocked), fits_on(some, leases, blocked)
    able = [
        each for each in leases if each.claim and each.claim.preemptible and each.claim.value < blocked.value
    ]
    if found is None:
        assert fits([]) or not fits(able)
        return
    chosen = [each for each in leases if each.id in found.victims]
    assert set(found.victims) <= {each.id for each in able}
    assert fits(chosen) and not fits([])
    assert not any(fits([each for each in chosen if each is not one]) for one in chosen)
    assert found.loss_s == sum(loss_s(each, NOW) for each in chosen)


@given(world=fleets())
@quick
def test_singles_on_equal_terms_lose_the_least_that_is_possible(
    world: tuple[Fleet, list[Lease], Claim],
) -> None:
    some, leases, blocked = world
    singles = [each for each in leases if len(each.devices) == 1]
    plain = replace(blocked, request=replace(blocked.request, cpu_cores=0.0))
    found, fits = taken(some, singles, plain), fits_on(some, singles, plain)
    able = [
        each for each in singles if each.claim and each.claim.preemptible and each.claim.value < plain.value
    ]
    losses = [
        sum(loss_s(each, NOW) for each in chosen)
        for number in range(1, len(able) + 1)
        for chosen in combinations(able, number)
        if fits(chosen)
    ]
    if found is not None:
        assert found.loss_s == min(losses)


@given(needed=st.sets(st.integers(0, 40), min_size=1, max_size=6), number=st.just(41))
@quick
def test_few_tests_find_the_few_that_are_needed(needed: set[int], number: int) -> None:
    leases = [replace(running("x", f"n0/{each}"), id=LeaseId(str(each))) for each in range(number)]
    tests = 0

    def is_enough(some: Collection[Lease]) -> bool:
        nonlocal tests
        tests += 1
        return needed <= {int(each.id) for each in some}

    assert {int(each.id) for each in least_enough(leases, is_enough)} == needed
    assert tests <= 2 * len(needed) * (1 + (41).bit_length())


@given(
    worths=st.lists(st.integers(0, 3), min_size=2, max_size=5),
    owners=st.lists(st.sampled_from("ab"), min_size=5, max_size=5),
)
@quick
def test_on_one_device_preemption_comes_to_rest(worths: list[int], owners: list[str]) -> None:
    """Whoever can take the only device back does so, over and over; each pair at most once each way."""
    some, quotas = fleet(1, 1), Quotas({"a": Quota(1)})
    waiting = [
        replace(claim(f"c{number}", value=value), preemptible=True, team=owners[number])
        for number, value in enumerate(worths)
    ]
    holder, turns = waiting.pop(), 0
    while turns <= 3 * len(worths):
        held = replace(lease(holder.id, "n0/0", held_s=3600), claim=holder)
        share = FairShare(quotas, some, [held])
        for blocked in waiting:
            rights = Rights(share.reclaimable(blocked), share.protected(blocked, [held]))
            if taken(some, [held], blocked, rights) is not None:
                waiting.remove(blocked)
                waiting.append(after_preemption(holder, blocked.id))
                holder, turns = blocked, turns + 1
                break
        else:
            return
    raise AssertionError("they preempt each other for ever")
