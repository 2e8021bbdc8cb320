"""The engine's events one by one; that it decides like `decide` is in `test_engine_properties`."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from airflow_gpu_provider.broker import admission, diagnosis, most_taken
from airflow_gpu_provider.broker.cycle import decide
from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import (
    Claim,
    ClaimId,
    CyclePolicy,
    Decisions,
    Lease,
    LeaseId,
    Placement,
    ReasonCode,
)
from airflow_gpu_provider.broker.quota import Quota, Quotas
from airflow_gpu_provider.broker.reservation import Reservation
from airflow_gpu_provider.broker.throughput import Speeds

from .builders import (
    NOW,
    TTL,
    claim,
    fleet,
    fleet_of,
    lease,
    node,
    placed,
    rejected,
    request,
    singles,
    snapshot,
)

POLICY = CyclePolicy()


def written(placement: Placement, engine_claim: object) -> Lease:
    request = engine_claim.request  # type: ignore[attr-defined]
    return Lease(
        LeaseId(f"lease-{placement.claim_id}"),
        placement.claim_id,
        placement.devices + placement.spares,
        request,
        NOW,
        NOW + TTL,
    )


def test_a_placed_claim_leaves_the_queue_and_its_devices_are_taken() -> None:
    engine = Engine(POLICY, fleet(1, 1), claims=[claim("a", value=1), claim("b")])
    assert placed(engine.turn(NOW)) == {"a": ["n0/0"]}
    assert engine.turn(NOW) == Decisions()
    assert [each.claim_id for each in engine.waiting(NOW)] == ["b"]
    engine.validate()


def test_what_could_not_be_written_waits_again() -> None:
    engine = Engine(POLICY, fleet(1, 1), claims=[claim("a")])
    engine.turn(NOW)
    engine.not_granted(ClaimId("a"))
    assert placed(engine.turn(NOW)) == {"a": ["n0/0"]}


def test_the_end_of_a_lease_starts_who_waits_for_it() -> None:
    first, second = claim("a", value=1), claim("b")
    engine = Engine(POLICY, fleet(1, 1), claims=[first, second])
    (placement,) = engine.turn(NOW).placements
    engine.granted(placement, written(placement, first))
    assert engine.turn(NOW) == Decisions()
    engine.end(LeaseId("lease-a"))
    assert placed(engine.turn(NOW)) == {"b": ["n0/0"]}
    engine.validate()


def test_a_lease_past_its_time_ends_and_a_renewed_one_does_not() -> None:
    engine = Engine(POLICY, fleet(1, 2), singles(2), [claim("a")])
    engine.renew(LeaseId("lease-busy-n0-1"), NOW + 3 * TTL)
    decisions = engine.turn(NOW + 2 * TTL)
    assert decisions.expired == (LeaseId("lease-busy-n0-0"),)
    assert placed(decisions) == {"a": ["n0/0"]}
    assert engine.turn(NOW + 2 * TTL) == Decisions()


def test_a_withdrawn_claim_gets_nothing() -> None:
    engine = Engine(POLICY, fleet(1, 1), claims=[claim("a")])
    engine.withdraw(ClaimId("a"))
    assert engine.turn(NOW) == Decisions()
    assert engine.waiting(NOW) == ()


def test_a_claim_told_twice_gets_devices_once() -> None:
    engine = Engine(POLICY, fleet(1, 2))
    engine.submit(claim("a"))
    engine.turn(NOW)
    engine.submit(claim("a"))
    assert engine.turn(NOW) == Decisions()


def test_what_never_fits_is_rejected_once_when_submitted_and_an_hour_after_nodes_left() -> None:
    engine = Engine(POLICY, fleet(2, 2), singles(2), [claim("four", 4)])
    engine.submit(claim("five", 5))
    assert rejected(engine.turn(NOW)) == {"five": "exceeds_fleet"}
    assert engine.turn(NOW) == Decisions()
    engine.set_fleet(fleet(1, 2), NOW)
    assert rejected(engine.turn(NOW)) == {}
    assert rejected(engine.turn(NOW + POLICY.impossible_for)) == {"four": "exceeds_fleet"}


def test_a_node_that_comes_back_starts_who_waits_for_it() -> None:
    some = fleet_of(node("a", 2, unavailable="drained"))
    engine = Engine(POLICY, some, claims=[claim("two", 2)])
    assert engine.turn(NOW) == Decisions()
    engine.set_fleet(fleet_of(node("a", 2)), NOW)
    assert set(placed(engine.turn(NOW))) == {"two"}
    engine.validate()


def test_a_node_that_gets_busy_takes_no_more_until_its_load_falls() -> None:
    engine = Engine(POLICY, fleet_of(node("a", 2, load=0.1)), claims=[claim("one")])
    engine.turn(NOW)
    engine.set_fleet(fleet_of(node("a", 2, load=0.9)), NOW)
    engine.submit(claim("two"))
    assert engine.turn(NOW) == Decisions()
    (standing,) = (each for each in engine.waiting(NOW) if each.claim_id == "two")
    assert standing is not None and standing.reason.code.value == "nodes_busy"
    engine.set_fleet(fleet_of(node("a", 2, load=0.2)), NOW)
    assert set(placed(engine.turn(NOW))) == {"two"}


def test_a_hold_that_time_ends_lets_a_short_claim_pass_no_longer() -> None:
    """The gang starts in 100 s: who promises 60 s passes now, but not in 50 s."""
    busy = [*singles(1, max_runtime_s=100, expires_in_s=1000)]
    engine = Engine(POLICY, fleet(1, 4), busy, [claim("gang", 4, value=99)])
    engine.turn(NOW)
    engine.submit(claim("soon", max_runtime_s=60))
    assert set(placed(engine.turn(NOW))) == {"soon"}
    engine.submit(claim("late", max_runtime_s=60))
    assert engine.turn(NOW + timedelta(seconds=50)) == Decisions()


def of(team: str | None, whose: Claim) -> Claim:
    return replace(whose, team=team)


def test_what_a_team_gets_of_one_model_moves_its_claims_for_another_back_in_the_same_turn() -> None:
    some = fleet_of(node("a", 2, "A100"), node("v", 1, "V100"))
    gang, single = of("a", claim("gang", 2, "A100", value=5)), of("b", claim("single", 1, "A100"))
    quotas = Quotas({"a": Quota(2), "b": Quota(1)})
    engine = Engine(POLICY, some, singles(1, on="a"), [gang, single], quotas=quotas)
    assert engine.turn(NOW) == Decisions(), "the gang is within its quota and keeps the free device"
    other = of("a", claim("other", 1, "V100", value=9))
    engine.submit(other)
    decided = engine.turn(NOW)
    assert set(placed(decided)) == {"other", "single"}, "with it the gang would borrow"
    reference = decide(snapshot(some, [gang, single, other], singles(1, on="a")), NOW, POLICY, quotas)
    assert placed(decided) == placed(reference)


def test_what_a_team_gives_back_of_one_model_lets_it_have_another_within_its_limit() -> None:
    some = fleet_of(node("a", 1, "A100"), node("v", 1, "V100"))
    held = replace(lease("x", "v/0"), claim=of("a", claim("x")))
    engine = Engine(
        POLICY, some, [held], [of("a", claim("next", 1, "A100"))], quotas=Quotas({"a": Quota(limit=1)})
    )
    assert engine.turn(NOW) == Decisions()
    (waits,) = engine.waiting(NOW)
    assert waits.reason.code is ReasonCode.OVER_QUOTA
    engine.end(held.id)
    assert placed(engine.turn(NOW)) == {"next": ["a/0"]}


def test_a_claim_above_its_teams_limit_is_rejected() -> None:
    big = of("a", claim("big", 3))
    engine = Engine(POLICY, fleet(1, 4), claims=[big], quotas=Quotas({"a": Quota(limit=2)}))
    (rejection,) = engine.turn(NOW).rejections
    assert rejection.reason.code is ReasonCode.OVER_QUOTA
    assert rejection.reason.text.endswith("may have 2; lower gpus or raise the team's limit")


def test_spares_are_no_way_around_a_limit() -> None:
    greedy = of("a", claim("greedy", 2, spares=2))
    engine = Engine(POLICY, fleet(1, 4), claims=[greedy], quotas=Quotas({"a": Quota(limit=3)}))
    (placement,) = engine.turn(NOW).placements
    assert len(placement.spares) == 1


def test_the_order_that_waiting_claims_are_told_is_the_one_in_which_they_start() -> None:
    """Two teams that borrow take turns, whatever their values."""
    queue = [of(team, claim(f"{team}{n}", value=value)) for team, value in (("a", 9), ("b", 1)) for n in "12"]
    busy = [replace(each, claim=of("z", claim(each.claim_id))) for each in singles(3)]
    engine = Engine(POLICY, fleet(1, 3), busy, queue, quotas=Quotas({"z": Quota(1)}))
    engine.turn(NOW)
    assert [each.claim_id for each in engine.waiting(NOW)] == ["a1", "b1", "a2", "b2"]
    for each in busy[:2]:
        engine.end(each.id)
    assert set(placed(engine.turn(NOW))) == {"a1", "b1"}


def test_many_tasks_that_ask_the_same_are_one_class_until_something_is_learned_of_them() -> None:
    queue = [claim(f"c{number}", task_class=f"dag.task{number}") for number in range(5)]
    engine = Engine(POLICY, fleet(1, 1), singles(1), queue)
    engine.turn(NOW)
    assert len(engine._pending.classes) == 1
    assert set(engine.stream.asked()) == {request()}
    engine.learn({"dag.task3": Speeds({"A100": 1.0})})
    engine.turn(NOW)
    assert sorted(len(each.queue) for each in engine._pending.classes.values()) == [1, 4]


def _of_class(name: str, task_class: str) -> Claim:
    return claim(name, task_class=task_class)


def test_only_claims_of_kinds_of_work_that_became_known_are_judged_anew() -> None:
    queue = [_of_class("a", "a"), _of_class("b", "b"), claim("plain")]
    engine = Engine(POLICY, fleet(1, 1), singles(1), queue)
    engine.turn(NOW)
    engine.learn({"a": Speeds({"A100": 9.0, "V100": 1.0})})
    assert [each.id for each in engine._intake] == ["a"]
    engine.turn(NOW)
    engine.learn({"a": Speeds({"A100": 8.0, "V100": 1.0}), "b": Speeds({"A100": 8.0, "V100": 1.0})})
    assert [each.id for each in engine._intake] == ["b"]
    engine.turn(NOW)
    assert {each.claim_id for each in engine.waiting(NOW)} == {"a", "b", "plain"}


def test_only_claims_whose_reservations_changed_are_judged_anew() -> None:
    queue = [replace(claim(name), team=team) for name, team in (("v", "vision"), ("t", "text"))]
    engine = Engine(POLICY, fleet(1, 2), singles(2), queue)
    engine.turn(NOW)
    window = Reservation("r", NOW + TTL, NOW + 9 * TTL, by="ann", team="vision", number=1)
    engine.reserve([window])
    assert [each.id for each in engine._intake] == ["v"]
    engine.turn(NOW)
    engine.reserve([])
    assert [each.id for each in engine._intake] == ["v"]


def test_prices_do_not_depend_on_when_something_was_learned() -> None:
    learned = {"a": Speeds({"A100": 9.0, "V100": 1.0})}
    some = fleet_of(node("a", 1, "A100"), node("v", 1, "V100"))
    early, late = (Engine(POLICY, some, learned=each) for each in (learned, None))
    for engine in (early, late):
        for number in range(3):
            engine.submit(_of_class(f"c{number}", "a"))
        engine.turn(NOW)
        engine.learn(learned)
    prices = [
        each.stream.speed_costs(each.floor.layout).of(request(task_class="b"), 1.0) for each in (early, late)
    ]
    assert prices[0] is not None and prices[0].tolist() == prices[1].tolist()


def test_what_is_remembered_of_claims_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, most in ((admission, "_VERDICTS"), (diagnosis, "_CLASSES"), (most_taken, "_REQUESTS")):
        monkeypatch.setattr(module, most, 3)
    shares = [replace(claim(f"c{number}", memory_mib=number + 1, milli=125), team="a") for number in range(9)]
    engine = Engine(POLICY, fleet(1, 1), singles(1), shares, quotas=Quotas({"a": Quota(1)}))
    engine.turn(NOW)
    assert len(engine.waiting(NOW)) == 9
    floor = engine.floor
    for cached in (floor.admission._verdicts, floor.outlook._cached, floor.share._most._cached):
        assert 0 < len(cached) <= 3
