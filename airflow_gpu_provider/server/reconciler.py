"""Leases against task states: what no callback reports is found by looking.

A task that is killed on its last try fires no callback and no listener in Airflow 3.3, and its lease would
live on until the TTL. The leader therefore compares, once a second, every claim and lease of an Airflow task
with the state of its task instance, and ends those whose try is over.

Work that outlives its worker lives as long as its task may still run, also between two tries and in a later
one. When that is over, its renewals are refused first: it saves itself in the time that its lease has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from airflow_gpu_provider.server.board import Entry, TaskId
from airflow_gpu_provider.wire import TaskKey

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


def airflow_task_states(tasks: Iterable[TaskId]) -> dict[TaskId, TaskState]:
    """Read task states from Airflow's metadata database; only for server-side processes."""
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import select, tuple_

    key = (TaskInstance.dag_id, TaskInstance.run_id, TaskInstance.task_id, TaskInstance.map_index)
    found: dict[TaskId, TaskState] = {}
    wanted = list(tasks)
    with create_session() as session:
        for start in range(0, len(wanted), 500):
            rows = session.execute(
                select(*key, TaskInstance.state, TaskInstance.try_number).where(
                    tuple_(*key).in_(wanted[start : start + 500])
                )
            )
            for dag_id, run_id, name, map_index, state, try_number in rows:
                value = None if state is None else str(getattr(state, "value", state))
                found[(dag_id, run_id, name, map_index)] = TaskState(value, try_number)
    return found
