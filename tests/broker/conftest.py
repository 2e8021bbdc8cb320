"""The `cycle` fixture: `decide`, with the invariants checked on every call when the test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime

import pytest

from airflow_gpu_provider.broker.cycle import decide
from airflow_gpu_provider.broker.model import Claim, CyclePolicy, Decisions, Fleet, Lease, Snapshot

from .builders import NOW, snapshot
from .invariants import check

Cycle = Callable[..., Decisions]


@pytest.fixture
def cycle() -> Iterator[Cycle]:
    """Return ``run(fleet, claims, leases, now, policy)``, or of a whole snapshot in place of the fleet."""
    seen: list[tuple[Snapshot, Decisions, datetime, CyclePolicy]] = []

    def run(
        what: Fleet | Snapshot,
        claims: Iterable[Claim] = (),
        leases: Iterable[Lease] = (),
        now: datetime = NOW,
        policy: CyclePolicy | None = None,
    ) -> Decisions:
        before = what if isinstance(what, Snapshot) else snapshot(what, claims, leases)
        policy = policy or CyclePolicy()
        decisions = decide(before, now, policy)
        seen.append((before, decisions, now, policy))
        return decisions

    yield run
    for each in seen:
        check(*each)
