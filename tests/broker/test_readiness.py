"""What is ready goes before what is not, within one value and for a bounded time."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import Claim, CyclePolicy
from airflow_gpu_provider.broker.rank import aged, rank, ranked, score

from .builders import NOW, claim, fleet, fleet_of, node, singles

POLICY = CyclePolicy()
OFF = CyclePolicy(readiness_boost=0)
parts = st.floats(0, 1)
boosts = st.floats(0, 0.99)
quick = settings(max_examples=200, deadline=None)


def far(name: str, completes: float | None, **more: object) -> Claim:
    """Return a claim that completes so much of its run."""
    return replace(claim(name, **more), completes=completes)  # type: ignore[arg-type]


def order_of(*claims: Claim, policy: CyclePolicy = POLICY) -> list[str]:
    return [each.id for _, each in ranked(claims, NOW, policy)]


def told(engine: Engine) -> list[str]:
    engine.turn(NOW)
    return [each.claim_id for each in engine.waiting(NOW)]


def test_what_completes_more_of_its_run_goes_first_among_equals() -> None:
    queue = far("a", None), far("b", 1 / 3), far("c", 1.0)
    assert order_of(*queue) == ["c", "b", "a"]
    assert order_of(*queue, policy=OFF) == ["a", "b", "c"]


def test_a_claim_rises_when_what_it_reads_arrives_and_sinks_when_it_goes() -> None:
    bare, stocked = node("n0", 1), node("n0", 1, artifacts=frozenset({"/m"}))
    reads = [claim(f"reads-{number}", artifacts=frozenset({"/m"})) for number in range(2)]
    engine = Engine(
        POLICY, fleet_of(bare), singles(1), [*reads, claim("z-other", artifacts=frozenset({"/x"}))]
    )
    engine.submit(claim("y-plain"))
    assert told(engine) == ["y-plain", "reads-0", "reads-1", "z-other"]
    engine.set_fleet(fleet_of(stocked), NOW)
    assert told(engine) == ["reads-0", "reads-1", "y-plain", "z-other"]
    engine.set_fleet(fleet_of(bare), NOW)
    assert told(engine) == ["y-plain", "reads-0", "reads-1", "z-other"]
    engine.validate()


def test_the_last_chunk_of_a_run_gets_the_device_before_the_first_of_another() -> None:
    engine = Engine(POLICY, fleet(1, 1), (), [far("first", 0.01), far("last", 1.0)])
    (placement,) = engine.turn(NOW).placements
    assert placement.claim_id == "last"


def test_a_score_adds_up_in_words() -> None:
    waits = far("c", 0.5, value=5, waited_min=30, max_runtime_s=240)
    found = score(waits, POLICY, there=0.5)
    assert found.explain(aged(waits, NOW, POLICY)) == "3.85 = 5 value + 0.25 ready + 0.60 waiting - 2.00 work"


@pytest.mark.parametrize("completes", [None, 0.0, 1.0])
def test_readiness_changes_nothing_that_value_means_for_preemption(completes: float | None) -> None:
    engine = Engine(POLICY, fleet(1, 1), (), [far("c", completes, value=3)])
    (waits,) = engine.claims()
    assert waits.value == 3


@given(boosts, parts, parts, parts, parts, st.integers(-5, 5), st.integers(1, 3))
@quick
def test_readiness_never_outweighs_a_point_of_value(
    boost: float, one: float, two: float, there: float, also_there: float, value: int, more: int
) -> None:
    policy = CyclePolicy(readiness_boost=boost)
    worth, ready = far("a", one, value=value + more), far("b", two, value=value)
    assert rank(worth, NOW, policy, there) < rank(ready, NOW, policy, also_there)


@given(boosts, parts, parts, parts, parts)
@quick
def test_who_is_readier_in_both_ways_is_never_behind(
    boost: float, one: float, two: float, there: float, also_there: float
) -> None:
    policy = CyclePolicy(readiness_boost=boost)
    less, more = sorted([one, two]), sorted([there, also_there])
    behind, before = score(far("c", less[0]), policy, more[0]), score(far("c", less[1]), policy, more[1])
    assert 0 <= behind.ready <= before.ready <= boost
    assert behind.points <= before.points
    unknown = score(far("c", None), policy, more[0])
    assert unknown.ready <= behind.ready


@given(boosts, parts, parts)
@quick
def test_whoever_waited_for_the_whole_boost_is_ahead_of_all_that_are_ready(
    boost: float, one: float, there: float
) -> None:
    """So nobody starves: what comes later is before a claim for a bounded time only."""
    policy = CyclePolicy(readiness_boost=boost)
    bound = timedelta(minutes=boost / policy.ageing_per_min + 0.01)
    patient = replace(far("patient", 0.0), submitted_at=NOW - bound)
    assert rank(patient, NOW, policy, 0.0) < rank(far("ready", one), NOW, policy, there)
