"""When a run's state is saved: by rank 0, after a synchronisation, while the others go on.

A checkpoint in between that cannot be written only makes the newest one older; the final one, and that of a
run that is asked to stop, are written in the open and raise CheckpointNotWritten. Used by `step_loop`; the
files are made by `checkpoint`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from airflow_gpu_provider.training.checkpoint import CheckpointFolder
from airflow_gpu_provider.training.checkpoint_files import CheckpointFacts
from airflow_gpu_provider.training.coordination import RunStore
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.run_file import CheckpointRecord
from airflow_gpu_provider.training.state import TrainingState


class Saving:
    """The checkpoints of one run as one shard sees them."""

    def __init__(
        self, plan: RunPlan, store: RunStore, state: TrainingState, *, tell: Callable[[str], None]
    ) -> None:
        facts = CheckpointFacts(
            shard_count=plan.shard_count, sync_interval=plan.sync_interval, seed=plan.seed
        )
        self._folder = CheckpointFolder(plan.checkpoint_dir, facts, keep=plan.keep_checkpoints, tell=tell)
        self._every_s = plan.checkpoint_every_s
        self._store = store
        self._state = state
        self._saved_at = time.monotonic()
        self.sync_schedule: list[tuple[int, int]] = []  #: of the state that `load_newest` found
        self.blocked_s = 0.0  #: for how long training has waited for checkpoints in between, in all

    def note_schedule(self, entries: list[tuple[int, int]]) -> None:
        """Note how often shards have shared what is saved from now on, and tell the supervisor."""
        self._folder.sync_schedule = entries
        self._store.put("sync_schedule", [list(entry) for entry in entries])

    def after_sync(self, version: int) -> None:
        """Tell what has been written since, and begin to write the state when that is due."""
        if (written := self._folder.take_written()) is not None:
            self._announce(written)
        began_at = time.monotonic()
        if began_at - self._saved_at >= self._every_s:
            self._folder.save_in_background(self._state, version)
            self._saved_at = time.monotonic()
            self.blocked_s += self._saved_at - began_at

    def save(self, version: int) -> None:
        """Write the state now. Raise CheckpointNotWritten."""
        self._announce(self._folder.save(self._state, version))

    def save_final(self, version: int) -> None:
        """Write the state of the last step unless it lies there already, and say that the run is through."""
        newest = self._folder.newest()
        final = newest if newest and newest.step >= version else self._folder.save(self._state, version)
        self._announce(final)
        self._store.put("final", final.model_dump(mode="json"))

    @property
    def is_final_saved(self) -> bool:
        """True once any shard has saved the state of the last step."""
        return self._store.get("final") is not None

    def load_final(self) -> None:
        """Take the state of the last step."""
        self._folder.load(self._state, CheckpointRecord.model_validate(self._store.get("final")))

    def load_newest(self) -> int:
        """Take the newest state there is and return its step, 0 when there is none."""
        record = self._folder.newest()
        if record is None:
            return 0
        self._folder.load(self._state, record)
        self.sync_schedule = record.sync_schedule
        if self._store.get("checkpoint") is None:  # else it is this run's own, from a handover of all ranks
            self._store.put("resumed_from", record.step)
        self._announce(record)
        return record.step

    def _announce(self, record: CheckpointRecord) -> None:
        self._store.put("checkpoint", record.model_dump(mode="json"))
