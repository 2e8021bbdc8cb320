"""What a replica knows of finished runs, read from the tables every few seconds.

Every replica keeps it, so that a new leader need not read it first, and any replica can answer. From a few
runs little follows, so it may be a few seconds old. Only what moved the speed of a class is told to the
engine. How carefully things are estimated is decided in `broker.throughput` and `broker.redundancy`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta

from sqlalchemy.exc import SQLAlchemyError

from airflow_gpu_provider.broker.flavor_table import extended
from airflow_gpu_provider.broker.model import NodeName
from airflow_gpu_provider.broker.redundancy import FailureHistory, Redundancy
from airflow_gpu_provider.broker.throughput import Measured, Speeds, ThroughputTable
from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.store.history import FinishedRun, RunStore

log = logging.getLogger(__name__)

_REFRESH_S = 3.0
_OF_EACH = 64  # runs of each class and model that are read at the start
_OVERLAP = timedelta(seconds=60)  # between two looks: other replicas' clocks and commits may be late
_MOVED = 0.01  # a speed that moved by less is not worth telling


class History:
    """Finished runs, folded. Thread-safe."""

    def __init__(self, store: RunStore, settings: Settings, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._clock = clock
        self._feeds_engine = settings.measured_throughput
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._table = ThroughputTable(flavors=extended(settings.own_flavors()))
        self._failures = FailureHistory()
        self._recent: set[str] = set()  #: leases whose runs a next look may return again
        self._seen_at: datetime | None = None
        self._speeds: dict[str, Speeds] = {}
        self._next_look = 0.0
        #: grows whenever a speed that counts has moved
        self.version = 0

    def start(self) -> None:
        """Begin to read; the first time may take seconds, and nobody must wait for it."""
        threading.Thread(target=self._begin, name="gpu-broker-history", daemon=True).start()

    def _begin(self) -> None:
        try:
            self.refresh()
        except SQLAlchemyError as error:
            log.warning("What finished runs told is not read yet, the next look comes soon: %s", error)

    def refresh(self) -> None:
        """Take what was written since the last look, unless that was a moment ago or goes on elsewhere."""
        if time.monotonic() < self._next_look or not self._reading.acquire(blocking=False):
            return
        try:
            now, seen_at = self._clock(), self._seen_at
            new = self._store.newest(_OF_EACH) if seen_at is None else self._store.since(seen_at - _OVERLAP)
            with self._lock:
                self._fold(run for run in new if run.lease_id not in self._recent)
            self._recent = {run.lease_id for run in new}
            self._seen_at = now
            self._next_look = time.monotonic() + _REFRESH_S
        finally:
            self._reading.release()

    def speeds(self) -> dict[str, Speeds]:
        """Return the speeds that count, by class; none where the settings say so."""
        with self._lock:
            return dict(self._speeds) if self._feeds_engine else {}

    def measured(self) -> Iterator[Measured]:
        """Yield what is known of the speed of each class and model."""
        self.refresh()
        with self._lock:
            found = list(self._table.measured(self._clock()))
        yield from found

    def redundancy(self, task_class: str | None, model: str | None, nodes: Iterable[str]) -> Redundancy:
        """Return the share of redundant shards for the next run."""
        self.refresh()
        with self._lock:
            return self._failures.redundancy(task_class, model, map(NodeName, nodes), now=self._clock())

    def kinds_of_runs(self) -> list[tuple[str | None, str | None]]:
        """Return the classes and models of which failures are known, the whole fleet first."""
        self.refresh()
        with self._lock:
            return self._failures.known()

    def _fold(self, runs: Iterable[FinishedRun]) -> None:
        classes = set()
        for run in runs:
            if (outcome := run.outcome()) is not None:
                self._failures.add(outcome)
            if (throughput := run.throughput()) is not None:
                self._table.add(throughput)
                classes.add(throughput.task_class)
        now, before = self._clock(), self.version
        for each in classes:
            speeds = self._table.speeds(each, now)
            if _differ(speeds, self._speeds.get(each, Speeds())):
                self._speeds[each] = speeds
                self.version = before + 1


def _differ(one: Speeds, other: Speeds) -> bool:
    if one.by_model.keys() != other.by_model.keys():
        return True
    pairs = ((speed, other.by_model[model]) for model, speed in one.by_model.items())
    return not all(math.isclose(new, old, rel_tol=_MOVED) for new, old in pairs)
