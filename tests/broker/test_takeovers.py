"""How the engine takes leases back: for whom, until when, and who gets what they held."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import (
    Claim,
    ClaimId,
    CyclePolicy,
    Decisions,
    Fleet,
    Lease,
    LeaseId,
    ReasonCode,
)
from airflow_gpu_provider.broker.preemption import after_preemption
from airflow_gpu_provider.broker.preemption_policy import PreemptionPolicy
from airflow_gpu_provider.broker.quota import NO_QUOTAS, Quota, Quotas
from airflow_gpu_provider.broker.reservation import Reservation

from .builders import NOW, claim, fleet, fleet_of, lease, node, placed

POLICY = PreemptionPolicy()
GRACE = POLICY.grace
LATER = NOW + timedelta(hours=1)


def soft(name: str, devices: str, *, ran_s: float = 3600, value: float = 0, **more: Any) -> Lease:
    """A lease of a preemptible claim that is renewed for long."""
    whose = replace(
        claim(name, len(devices.split()), value=value), preemptible=True, team=more.pop("team", None)
    )
    return replace(lease(name, devices, held_s=ran_s, expires_in_s=7200, **more), claim=whose)


def engine_of(
    some: Fleet,
    leases: Iterable[Lease],
    *claims: Claim,
    quotas: Quotas = NO_QUOTAS,
    policy: PreemptionPolicy = POLICY,
    taken_back: Iterable[Lease] = (),
) -> Engine:
    return Engine(
        CyclePolicy(), some, leases, claims, quotas=quotas, preemption=policy, taken_back=taken_back
    )


def urgent(gpus: int = 1, name: str = "urgent", **more: Any) -> Claim:
    return claim(name, gpus, value=more.pop("value", 9), **more)


def victims(decisions: Decisions) -> dict[str, list[str]]:
    return {
        found.for_claim: [name.removeprefix("lease-") for name in found.victims]
        for found in decisions.preemptions
    }


def test_what_a_lease_gives_up_goes_to_the_claim_that_it_was_taken_back_for_and_to_nobody_else() -> None:
    engine = engine_of(fleet(1, 1), [soft("work", "n0/0")], urgent())
    first = engine.turn(NOW)
    assert victims(first) == {"urgent": ["work"]}
    assert first.preemptions[0].end_by == NOW + GRACE
    (waits,) = engine.waiting(NOW)
    assert (waits.reason.code, waits.starts_in_s) == (ReasonCode.DEVICES_TAKEN_BACK, GRACE.total_seconds())
    engine.submit(urgent(name="richer", value=99))
    engine.submit(urgent(name="short", value=0, max_runtime_s=1))
    engine.end(LeaseId("lease-work"))
    assert placed(engine.turn(NOW)) == {"urgent": ["n0/0"]}
    engine.validate()


def test_a_lease_that_is_taken_back_ends_in_time_however_often_it_is_renewed() -> None:
    engine = engine_of(fleet(1, 1), [soft("work", "n0/0")], urgent())
    engine.turn(NOW)
    engine.renew(LeaseId("lease-work"), LATER)
    assert engine.turn(NOW + GRACE - timedelta(seconds=1)).expired == ()
    last = engine.turn(NOW + GRACE)
    assert last.expired == (LeaseId("lease-work"),)
    assert placed(last) == {"urgent": ["n0/0"]}


def test_what_the_first_of_two_gives_up_is_kept_until_the_second_has_ended() -> None:
    engine = engine_of(fleet(1, 2), [soft("a", "n0/0"), soft("b", "n0/1")], urgent(2))
    assert victims(engine.turn(NOW)) == {"urgent": ["a", "b"]}
    engine.submit(urgent(name="richer", value=99))
    engine.end(LeaseId("lease-a"))
    assert placed(engine.turn(NOW)) == {}
    engine.validate()
    told = {each.claim_id: each.reason.text for each in engine.waiting(NOW)}
    assert "1 device(s) of others are kept already" in told[ClaimId("urgent")]
    engine.end(LeaseId("lease-b"))
    assert set(placed(engine.turn(NOW))) == {"urgent"}
    engine.validate()


def test_who_withdraws_spares_the_leases_that_still_run_and_frees_what_was_kept() -> None:
    engine = engine_of(fleet(1, 2), [soft("a", "n0/0"), soft("b", "n0/1")], urgent(2))
    engine.turn(NOW)
    engine.end(LeaseId("lease-a"))
    engine.turn(NOW)
    engine.submit(urgent(name="other", value=0))
    engine.withdraw(ClaimId("urgent"))
    decided = engine.turn(NOW)
    assert decided.spared == (LeaseId("lease-b"),)
    assert placed(decided) == {"other": ["n0/0"]}
    engine.renew(LeaseId("lease-b"), LATER)
    assert engine.turn(NOW + GRACE).expired == ()
    engine.validate()


def test_who_starts_elsewhere_spares_them_too() -> None:
    firm = lease("firm", "n0/0", expires_in_s=7200)
    engine = engine_of(fleet(1, 2), [firm, soft("work", "n0/1")], urgent())
    assert victims(engine.turn(NOW)) == {"urgent": ["work"]}
    engine.end(firm.id)
    decided = engine.turn(NOW)
    assert placed(decided) == {"urgent": ["n0/0"]}
    assert decided.spared == (LeaseId("lease-work"),)


def test_time_alone_lets_a_lease_be_taken_back_once_it_has_run_long_enough() -> None:
    engine = engine_of(fleet(1, 1), [soft("work", "n0/0", ran_s=0)], urgent())
    long_enough = NOW + POLICY.least_runtime
    assert engine.turn(NOW).preemptions == ()
    assert engine.turn(long_enough - timedelta(seconds=1)).preemptions == ()
    assert victims(engine.turn(long_enough)) == {"urgent": ["work"]}


def test_two_claims_never_have_the_same_lease_taken_back() -> None:
    leases = [soft("a", "n0/0"), soft("b", "n0/1")]
    engine = engine_of(fleet(1, 2), leases, urgent(name="one"), urgent(2, name="two", value=8))
    found = victims(engine.turn(NOW))
    assert found == {"one": ["a"]}, "what is left is not enough for the other"
    assert victims(engine.turn(NOW + timedelta(seconds=1))) == {}


def test_the_next_one_of_a_class_is_served_as_if_the_first_did_not_wait() -> None:
    engine = engine_of(fleet(1, 2), [soft("a", "n0/0"), soft("b", "n0/1", ran_s=1)], urgent(name="one"))
    assert victims(engine.turn(NOW)) == {"one": ["a"]}
    engine.submit(urgent(name="next", value=5))
    engine.end(LeaseId("lease-b"))
    assert placed(engine.turn(NOW)) == {"one": ["n0/1"]}, "it is first, wherever it starts"
    engine.end(LeaseId("lease-a"))
    assert placed(engine.turn(NOW)) == {"next": ["n0/0"]}


def test_work_that_was_preempted_does_not_take_back_from_the_one_it_made_way_for() -> None:
    work = soft("work", "n0/0")
    engine = engine_of(fleet(1, 1), [work], urgent())
    engine.turn(NOW)
    engine.end(work.id)
    (placement,) = engine.turn(NOW).placements
    assert work.claim is not None
    again = replace(after_preemption(work.claim, ClaimId("urgent")), value=99.0)
    engine.submit(again)
    holder = replace(urgent(), preemptible=True)
    engine.granted(
        placement,
        Lease(LeaseId("l"), holder.id, placement.devices, holder.request, NOW, LATER, claim=holder),
    )
    assert engine.turn(NOW + timedelta(minutes=30)).preemptions == ()


def test_an_owner_takes_back_what_was_borrowed_even_from_firm_work() -> None:
    firm = soft("firm", "n0/0", team="guest", value=99)
    assert firm.claim is not None
    firm = replace(firm, claim=replace(firm.claim, preemptible=False))
    owner = replace(urgent(value=0), team="owner")
    quotas = Quotas({"owner": Quota(1)})
    assert victims(engine_of(fleet(1, 1), [firm], owner, quotas=quotas).turn(NOW)) == {"urgent": ["firm"]}
    assert engine_of(fleet(1, 1), [firm], owner).turn(NOW).preemptions == ()


def test_who_stays_on_reserved_devices_makes_way_for_the_one_they_are_reserved_for() -> None:
    firm = replace(lease("firm", "n0/0", held_s=3600, expires_in_s=7200), claim=claim("firm", value=99))
    owner = replace(urgent(value=0), team="owner")
    engine = engine_of(fleet(1, 1), [firm], owner)
    window = NOW - timedelta(minutes=1), NOW + timedelta(hours=1)
    engine.reserve([Reservation("r", *window, by="ada", team="owner", devices=frozenset(firm.devices))])
    assert victims(engine.turn(NOW)) == {"urgent": ["firm"]}


def test_another_fleet_changes_neither_what_is_kept_nor_what_still_ends() -> None:
    engine = engine_of(fleet(1, 2), [soft("a", "n0/0"), soft("b", "n0/1")], urgent(2))
    engine.turn(NOW)
    engine.end(LeaseId("lease-a"))
    engine.turn(NOW)
    engine.set_fleet(fleet_of(node("n0", 2), node("n9", 1, "V100")), NOW)
    engine.submit(urgent(name="richer", model="A100", value=99))
    assert placed(engine.turn(NOW)) == {}
    engine.validate()
    engine.end(LeaseId("lease-b"))
    assert placed(engine.turn(NOW)) == {"urgent": ["n0/0", "n0/1"]}


def test_a_node_that_is_drained_and_comes_back_still_keeps_what_was_taken_back() -> None:
    engine = engine_of(fleet(1, 2), [soft("a", "n0/0"), soft("b", "n0/1")], urgent(2))
    engine.turn(NOW)
    engine.end(LeaseId("lease-a"))
    engine.turn(NOW)
    engine.submit(urgent(name="richer", value=99))
    for why in ("drained", None):
        engine.set_fleet(fleet_of(node("n0", 2, unavailable=why)), NOW)
        assert placed(engine.turn(NOW)) == {}
        engine.validate()


def test_a_claim_that_can_still_not_start_when_all_has_ended_keeps_nothing() -> None:
    """Its free device was drained meanwhile."""
    engine = engine_of(fleet(1, 2), [soft("a", "n0/0")], urgent(2))
    assert victims(engine.turn(NOW)) == {"urgent": ["a"]}
    engine.set_fleet(fleet_of(node("n0", 2, bad={1: "drained"})), NOW)
    engine.end(LeaseId("lease-a"))
    engine.submit(urgent(name="small", value=0))
    engine.turn(NOW + timedelta(seconds=1))
    assert placed(engine.turn(NOW + timedelta(seconds=1))) == {"small": ["n0/0"]}
    engine.validate()


def test_a_new_leader_goes_on_where_the_old_one_was() -> None:
    running = replace(soft("b", "n0/1"), ends_for=ClaimId("urgent"), must_end_at=NOW + GRACE)
    ended = replace(soft("a", "n0/0"), ends_for=ClaimId("urgent"))
    engine = engine_of(fleet(1, 2), [running], urgent(2), urgent(name="richer", value=99), taken_back=[ended])
    assert engine.turn(NOW) == Decisions()
    engine.validate()
    assert placed(engine.turn(NOW + GRACE)) == {}, "a lease that is renewed no more ends by its TTL"
    engine.end(running.id)
    assert set(placed(engine.turn(NOW + GRACE))) == {"urgent"}


def test_without_leases_that_may_be_taken_nobody_looks() -> None:
    engine = engine_of(fleet(1, 1), [lease("firm", "n0/0", expires_in_s=7200)], urgent())
    engine.turn(NOW)
    for seconds in range(3):
        assert engine.is_settled
        assert engine.turn(NOW + timedelta(seconds=seconds)) == Decisions()


def test_a_budget_of_nothing_turns_it_off() -> None:
    off = replace(POLICY, budget=0)
    assert engine_of(fleet(1, 1), [soft("work", "n0/0")], urgent(), policy=off).turn(NOW).preemptions == ()
