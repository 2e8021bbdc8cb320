"""What the fleet never had is rejected at once; what it lost is waited for, for a while and with a reason."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import Claim, CyclePolicy, Fleet, ReasonCode

from .builders import NOW, claim, fleet, fleet_of, lease, node, placed, rejected

POLICY = CyclePolicy(impossible_for=timedelta(minutes=10))
SMALL = fleet_of(node("a", 2))
WHOLE = fleet_of(node("a", 2), node("b", 2))


def minutes(number: float) -> timedelta:
    return timedelta(minutes=number)


def waiting_for_four(fleet_now: Fleet = WHOLE) -> Engine:
    """Return an engine in which a gang of four waits for a lease to end."""
    held = replace(lease("busy", "a/0"), expires_at=NOW + timedelta(days=1))
    engine = Engine(POLICY, fleet_now, [held])
    engine.submit(claim("gang", 4))
    engine.turn(NOW)
    return engine


def test_a_claim_that_was_let_in_waits_for_devices_that_left_and_hears_until_when() -> None:
    engine = waiting_for_four()
    engine.set_fleet(SMALL, NOW)
    assert not engine.turn(NOW + minutes(1)).rejections
    (told,) = engine.waiting(NOW + minutes(1))
    assert told.reason.code is ReasonCode.IMPOSSIBLE
    assert told.reason.text == (
        "asked 4 GPUs in one gang; the fleet has 2, the largest node 2; lower gpus or add nodes; "
        "impossible since 2026-03-01 12:01 UTC; rejected at 2026-03-01 12:11 UTC unless what is missing "
        "comes back"
    )
    assert told.impossible_since == NOW + minutes(1)


def test_it_is_queued_again_at_once_when_they_are_back() -> None:
    engine = waiting_for_four()
    engine.set_fleet(SMALL, NOW)
    engine.turn(NOW + minutes(1))
    engine.set_fleet(WHOLE, NOW + minutes(2))
    engine.end(lease("busy", "a/0").id)
    assert set(placed(engine.turn(NOW + minutes(2)))) == {"gang"}


def test_it_is_rejected_after_its_time_by_the_clock_alone_and_a_return_starts_the_count_anew() -> None:
    engine = waiting_for_four()
    for shrinks, grows in ((0, 9), (10, 10)):
        engine.set_fleet(SMALL, NOW + minutes(shrinks))
        engine.turn(NOW + minutes(shrinks))
        assert not engine.turn(NOW + minutes(grows)).rejections
        if grows == 9:
            engine.set_fleet(WHOLE, NOW + minutes(9.5))
            engine.turn(NOW + minutes(9.5))
            assert [each.impossible_since for each in engine.waiting(NOW + minutes(9.5))] == [None]
    assert not engine.turn(NOW + minutes(19.9)).rejections
    (rejection,) = engine.turn(NOW + minutes(20)).rejections
    assert rejection.reason.code is ReasonCode.EXCEEDS_FLEET
    assert rejection.reason.text.endswith("impossible since 2026-03-01 12:10 UTC")
    assert not list(engine.claims())


def test_a_new_claim_that_the_fleet_cannot_run_is_rejected_at_once_also_during_an_outage() -> None:
    engine = waiting_for_four()
    engine.set_fleet(SMALL, NOW)
    engine.submit(claim("new", 3))
    assert rejected(engine.turn(NOW)) == {"new": "exceeds_fleet"}


def test_before_any_agent_has_reported_claims_wait_and_more_nodes_may_follow_the_first() -> None:
    engine = Engine(POLICY, Fleet())
    engine.submit(claim("early", 4))
    assert not engine.turn(NOW).rejections
    (told,) = engine.waiting(NOW)
    assert told.reason.text.startswith("asked 4 GPUs; the fleet has no devices: start an agent")
    engine.set_fleet(SMALL, NOW + minutes(1))
    assert not engine.turn(NOW + minutes(1)).rejections
    engine.set_fleet(WHOLE, NOW + minutes(2))
    assert set(placed(engine.turn(NOW + minutes(2)))) == {"early"}


def test_the_next_leader_goes_on_counting() -> None:
    engine = waiting_for_four()
    engine.set_fleet(SMALL, NOW)
    engine.turn(NOW)
    (stuck,) = engine.claims()
    heir = Engine(POLICY, SMALL, claims=[stuck])
    assert not heir.turn(NOW + minutes(9)).rejections
    assert rejected(heir.turn(NOW + minutes(10))) == {"gang": "exceeds_fleet"}


def test_a_claim_that_waited_under_the_last_leader_is_not_rejected_by_the_next_at_once() -> None:
    heir = Engine(POLICY, SMALL, claims=[replace(claim("gang", 4), admitted=True)])
    assert not heir.turn(NOW).rejections


def test_a_withdrawn_claim_is_gone_though_it_was_impossible() -> None:
    engine = waiting_for_four()
    engine.set_fleet(SMALL, NOW)
    engine.turn(NOW)
    engine.withdraw(claim("gang").id)
    assert not engine.turn(NOW + minutes(60)).rejections
    engine.validate()


def excluding(name: str, *devices: str) -> Claim:
    return claim(name, 2, excluded=devices)


def test_a_failed_device_that_is_out_of_service_is_waited_for_when_there_is_no_other() -> None:
    """On a machine of two GPUs the retry of a gang of two needs the one that failed, once it is repaired."""
    engine = Engine(POLICY, fleet_of(node("a", 2, bad={0: "XID 79"})))
    engine.submit(excluding("retry", "a/0"))
    assert not engine.turn(NOW).rejections
    (told,) = engine.waiting(NOW)
    assert told.reason.code is ReasonCode.DEVICES_UNAVAILABLE and "XID 79" in told.reason.text
    engine.set_fleet(SMALL, NOW + minutes(1))
    assert set(placed(engine.turn(NOW + minutes(1)))) == {"retry"}


def test_a_failed_device_is_avoided_where_there_are_others_and_never_when_it_is_in_service() -> None:
    engine = Engine(POLICY, WHOLE)
    engine.submit(excluding("retry", "a/0"))
    assert "a/0" not in placed(engine.turn(NOW))["retry"]
    engine = Engine(POLICY, fleet(1, 2))
    engine.submit(excluding("hopeless", "n0/0"))
    assert rejected(engine.turn(NOW)) == {"hopeless": "devices_excluded"}
