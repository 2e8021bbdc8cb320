"""What is free when, and how few moments are looked at to find the first one that will do."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_provider.broker import releases
from airflow_gpu_provider.broker.capacity import Capacity, Part
from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.forecast import _first
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.model import Claim, ClaimId, CyclePolicy, GpuRequest, Lease, LeaseId
from airflow_gpu_provider.broker.releases import Releases

from .builders import fleet

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)

seconds = st.integers(0, 50).map(float)
amount = st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 1000))
parts = st.builds(Part, st.lists(amount, max_size=3).map(tuple), st.lists(amount, max_size=2).map(tuple))
endings = st.lists(st.tuples(seconds, parts), max_size=12)


@given(
    st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.integers(0, 400)))
)
def test_the_first_moment_is_found_from_any_guess_with_few_looks(case: tuple[int, int, int]) -> None:
    count, first, guess = case
    looks: list[int] = []

    def fits(moment: int) -> bool:
        looks.append(moment)
        return moment >= first

    assert _first(fits, count, guess) == first
    assert all(0 <= moment < count for moment in looks) and len(looks) == len(set(looks))
    away = abs(first - min(guess, count - 1))
    assert len(looks) <= 3 + 2 * math.log2(away + 1), "what is near is found at once"


@given(endings, endings, seconds)
def test_what_is_free_at_a_moment_is_what_ends_until_then(
    begun: list[tuple[float, Part]], booked: list[tuple[float, Part]], moment: float
) -> None:
    layout = Layout.of(fleet(nodes=4, gpus=4))
    free = Capacity.empty(layout)
    found = Releases(begun)
    for ends, part in booked:
        found.add(ends, part)
    then, expected = found.until(moment, free), free.copy()
    for ends, part in (*begun, *booked):
        if ends <= moment:
            for bank, slot, milli in part.devices:
                expected.milli[bank, slot] += milli
            for node, cpu, memory in part.nodes:
                expected.cpu[node] += cpu
                expected.memory[node] += memory
    for name in ("milli", "cpu", "memory"):
        assert (getattr(then, name) == getattr(expected, name)).all()
    assert found.times == sorted([0.0, *(ends for ends, _ in (*begun, *booked))])


def test_where_a_long_queue_stands_is_worked_out_with_few_looks_at_the_time_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, until = [], releases.Releases.until

    def counted(self: Releases, seconds: float, free: Capacity) -> Capacity:
        looks.append(seconds)
        return until(self, seconds, free)

    monkeypatch.setattr(releases.Releases, "until", counted)
    known = fleet(nodes=100, gpus=8)
    devices = [device.id for node in known.nodes for device in node.devices]
    held = [
        Lease(
            LeaseId(f"l{at}"),
            ClaimId(f"h{at}"),
            (device,),
            GpuRequest(max_runtime_s=60 + 7 * at),
            NOW,
            NOW + timedelta(hours=9),
        )
        for at, device in enumerate(devices)
    ]
    waiting = [
        Claim(ClaimId(f"c{at}"), GpuRequest(gpus=1 + at % 5, max_runtime_s=600 + at), NOW)
        for at in range(400)
    ]
    engine = Engine(CyclePolicy(), known, held, waiting)
    engine.turn(NOW)
    looks.clear()
    found = engine.waiting(NOW, limit=200)
    assert sum(each.starts_in_s is not None for each in found) == 100
    assert len(looks) <= 100 * 9, "with 800 leases, a search from scratch takes 11 for each"
