"""Leases against task states: what no callback reports is found by looking.

A task that is killed on its last try fires no callback and no listener in Airflow 3.3, and its lease would
live on until the TTL. The leader therefore compares, once a second, every claim and lease of an Airflow task
with the state of its task instance, and ends those whose try is over.

Work that outlives its worker lives as long as its task may still run, also between two tries and in a later
one. When that is over, its renewals are refused first: it saves itself in the time that its lease has left.

Airflow's database is not ours, and may hang: this thread waits for nobody but it, and nobody waits for this
thread. The states themselves come from `airflow_tasks`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from airflow_gpu_provider.server.board import Entry, TaskId, task_of
from airflow_gpu_provider.server.desk import Desk
from airflow_gpu_provider.server.requests import Cancel
from airflow_gpu_provider.wire import TaskKey

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_STOPS_S = 2.0  # a question that hangs is left to its thread, which ends with the process
#: A question that is open for so long is told to people.
_SLOW = timedelta(seconds=5)
_TELL_AGAIN_S = 60.0

# "scheduled" and "queued": a deferred task passes through them on its way back to a worker
_ALIVE = frozenset({"running", "deferred", "scheduled", "queued", "restarting", "awaiting_input"})
# Between two tries, and None after a scheduler that died with its workers; "restarting": a person cleared it
_ALIVE_WITHOUT_WORKER = (_ALIVE - {"restarting"}) | {"up_for_retry", "up_for_reschedule", None}


@dataclass(frozen=True, slots=True)
class TaskState:
    """What Airflow says of a task instance."""

    state: str | None
    try_number: int


TaskStates = Callable[[Iterable[TaskId]], Mapping[TaskId, TaskState]]


def why_over(key: TaskKey, state: TaskState | None, *, outlives_worker: bool = False) -> str | None:
    """Return why a try is over, None while it lives."""
    if state is None:
        return "task_removed"
    if outlives_worker:  # a later try takes it over or supersedes it when it asks for devices
        return None if state.state in _ALIVE_WITHOUT_WORKER else f"task_{state.state}"
    if state.try_number > key.try_number:
        return "later_try"
    if state.state not in _ALIVE:
        return f"task_{state.state or 'cleared'}"
    return None


def is_to_end(entry: Entry, reason: str | None, now: datetime, ttl_s: float) -> bool:
    """Say whether a claim is to be ended now, and note when its work is to stop by itself first.

    Another replica renews without this note, so that what has not stopped within two TTLs is ended.
    """
    if reason is None:
        entry.over_since = None
        return False
    if not entry.body.outlives_worker or entry.held is None or not entry.held.collected:
        return True
    entry.over_since = entry.over_since or now
    return now - entry.over_since > timedelta(seconds=2 * ttl_s)


class Reconciler(threading.Thread):
    """The thread that compares while its replica leads: one question at a time, however long it takes."""

    def __init__(
        self, desk: Desk, task_states: TaskStates | None, *, ttl_s: float, clock: Callable[[], datetime]
    ) -> None:
        super().__init__(name="gpu-broker-reconciler", daemon=True)
        self._desk = desk
        self._task_states = task_states
        self._ttl_s = ttl_s
        self._clock = clock
        self._stopping = threading.Event()
        self._asked_at: datetime | None = None  #: when the question was asked that has no answer yet
        self._failing_since: datetime | None = None
        self._failure = ""
        self._tell_at: float | None = None  #: when people are told again; None = there is nothing to tell

    def stop(self) -> None:
        """End the loop; a question that hangs now ends nothing any more."""
        self._stopping.set()
        if self.is_alive():
            self.join(_STOPS_S)

    def run(self) -> None:
        """Loop until `stop`."""
        while not self._stopping.wait(_EVERY_S):
            try:
                if self._desk.is_open:
                    self.reconcile()
            except Exception:
                log.exception("The comparison with Airflow's task states failed; trying again")

    def reconcile(self) -> None:
        """Ask the desk to end what Airflow says is over."""
        entries = [entry for entry in list(self._desk.board.entries.values()) if entry.body.ti_id]
        if self._task_states is None or not entries:
            self._failing_since = None
            return
        states = self._ask({task_of(entry.body.key) for entry in entries})
        if states is None or self._stopping.is_set():
            return
        for entry in entries:
            state, outlives = states.get(task_of(entry.body.key)), entry.body.outlives_worker
            reason = why_over(entry.body.key, state, outlives_worker=outlives)
            if is_to_end(entry, reason, self._clock(), self._ttl_s) and reason:
                log.info("Ending claim %s of %s: %s", entry.claim_id, entry.body.key.task_id, reason)
                self._desk.ask(Cancel(entry.claim_id, reason))

    def _ask(self, tasks: set[TaskId]) -> Mapping[TaskId, TaskState] | None:
        """Return the states of these tasks; None when they cannot be had, which `trouble` tells."""
        assert self._task_states is not None
        self._asked_at = asked_at = self._clock()
        try:
            states = self._task_states(tasks)
        except Exception as error:
            # Airflow's database, not ours: leases still end by release and TTL.
            self._failing_since = self._failing_since or asked_at
            self._failure = str(error).partition("\n")[0] or type(error).__name__
            return None
        finally:
            self._asked_at = None
        self._failing_since = None
        return states

    def trouble(self, now: datetime) -> str | None:
        """Return since when Airflow's task states are not known, and why; None while they are."""
        asked_at, failing_since = self._asked_at, self._failing_since
        if asked_at is not None and now - asked_at > _SLOW:
            since, why = failing_since or asked_at, "its database does not answer"
        elif failing_since is not None:
            since, why = failing_since, self._failure
        else:
            return None
        return (
            f"Airflow's task states are not known since {since:%H:%M:%S UTC}: {why}. Killed tasks keep their "
            "devices until their leases run out; look at Airflow's database."
        )

    def tell(self, now: datetime) -> None:
        """Warn of trouble, again each minute while it lasts. For another thread: this one hangs."""
        trouble = self.trouble(now)
        if trouble is None:
            if self._tell_at is not None:
                log.info("Airflow's task states are known again")
            self._tell_at = None
        elif self._tell_at is None or time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + _TELL_AGAIN_S
            log.warning("%s", trouble)
