"""The record of a run as its supervisor keeps it: begun, filled from what the shards announce, written.

Written when it changed, at most twice a second, and always at the end. The supervisor changes the record;
only this file turns it into run.json, and only this file knows which of the keys in the store announce what.
"""

from __future__ import annotations

import os
import time
from datetime import datetime, timezone

from airflow_gpu_provider.training.coordination import RunStore
from airflow_gpu_provider.training.liveness import Liveness
from airflow_gpu_provider.training.membership import Membership
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.run_file import CheckpointRecord, RunRecord, RunState, write_record

_WRITE_EVERY_S = 0.5


class Chronicle:
    """One run's record."""

    def __init__(self, plan: RunPlan, previous: RunRecord | None) -> None:
        self._path = plan.paths.run
        self._last_write: tuple[str, float] = ("", 0.0)
        self.record = _first_record(plan, previous)

    def take_announcements(self, store: RunStore) -> None:
        """Note what shards have said of steps and checkpoints."""
        if isinstance(checkpoint := store.get("checkpoint"), dict):
            known, self.record.checkpoint = (
                self.record.checkpoint,
                CheckpointRecord.model_validate(checkpoint),
            )
            if known is None or known.step != self.record.checkpoint.step:
                self.record.summary.checkpoints += 1
        for name in ("step_count", "resumed_from"):
            if isinstance(value := store.get(name), int):
                setattr(self.record, name, value)

    def note_members(self, membership: Membership, liveness: Liveness) -> None:
        """Note who has which rank."""
        self.record.generation = membership.generation
        self.record.members = dict(membership.members)
        self.record.spares = list(membership.spares)
        self.record.warm = sorted(liveness.parked().intersection(membership.spares))

    def write(self, *, force: bool = False) -> None:
        """Write the record where it changed and the last time is long enough ago."""
        now = time.monotonic()
        if not force and now - self._last_write[1] < _WRITE_EVERY_S:
            return
        content = self.record.model_dump_json(exclude={"updated_at"})
        if force or content != self._last_write[0]:
            write_record(self._path, self.record)
            self._last_write = (content, now)


def _first_record(plan: RunPlan, previous: RunRecord | None) -> RunRecord:
    """Return the record that this supervisor begins with: what a lost one has written is kept."""
    now = datetime.now(timezone.utc)
    if previous is None:
        record = RunRecord(run_id=plan.run_id, pid=os.getpid(), started_at=now, updated_at=now)
    else:
        changes = {"pid": os.getpid(), "state": RunState.STARTING, "generation": previous.generation + 1}
        record = previous.model_copy(update=changes)
        record.supervisor_restarts += 1
    record.respawns_left = plan.max_respawns
    return record
