"""How many redundant shards a try needs after what became of the try before.

A try that lost more shards than it had spares for is followed by one with more of them, one for each that was
missing, up to half of the shards. Losses that a spare would share (the author's errors, memory, a full disk)
and ends that have nothing to do with shards raise nothing. Read from the run's folder, so that it holds when
the worker was killed and no callback ran. Used by `operators.training`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from airflow_gpu_provider.training.plan import RunPaths, RunPlan
from airflow_gpu_provider.training.run_file import RunRecord, RunState, read_record, write_json
from airflow_gpu_provider.training.run_folder import RunFolder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LastTry:
    """What became of the try before: its redundant shards, and how many more would have helped."""

    spares: int
    more: int
    reason: str

    def spares_now(self, shards: int) -> int:
        """Return how many redundant shards a try of ``shards`` has at least; that is half of them at most."""
        return min(self.spares + self.more, most_spares(shards))

    def sentence(self, shards: int) -> str:
        """Say what that means for a try of ``shards``, and why."""
        now = self.spares_now(shards)
        limit = " (no more than half of the shards)" if self.spares + self.more > now else ""
        change = f"after {self.spares} in the try before" if now != self.spares else "as in the try before"
        return f"At least {now} redundant shard(s) {change}{limit}: {self.reason}"


def most_spares(shards: int) -> int:
    """Return how many redundant shards raising leads to at most: more would cost more than starting anew."""
    return max(1, shards // 2)


def last_try(folder: RunFolder) -> LastTry | None:
    """Return what became of the newest attempt; None when there is none or it succeeded.

    Raise OSError or ValueError when what it left cannot be read.
    """
    attempt = folder.last_attempt()
    if attempt is None:
        return None
    paths = RunPaths(attempt)
    plan = RunPlan.model_validate_json(paths.plan.read_text())
    record = read_record(paths.run)
    if record is not None and record.state is RunState.SUCCEEDED:
        return None
    more, reason = shards_missed(record, lease_lost=paths.lease_lost.exists())
    return LastTry(len(plan.spare_slots), more, reason)


def note_lost_lease(run_dir: Path, why: str) -> None:
    """Leave word for the next try that this one ended with its lease, whatever its record says."""
    try:
        write_json(RunPaths(run_dir).lease_lost, f"{why}\n")
    except OSError as error:
        log.warning("No word of the lost lease is left for the next try: %s", error)


def shards_missed(record: RunRecord | None, *, lease_lost: bool) -> tuple[int, str]:
    """Return how many more redundant shards would have helped a try that failed, and why so many."""
    if lease_lost:
        return 0, "it lost its lease, which no shard can prevent"
    if record is None or not record.state.is_terminal or record.orphaned:
        return 1, "it broke off with its worker or its supervisor, and what took them may take shards"
    if record.state is RunState.STOPPED:
        return 0, "it was asked to stop"
    missing = record.unreplaced
    if not missing:
        return 0, f"no shard was missing when it failed: {record.error}"
    alike = next((failure for failure in missing if not failure.cause.is_helped_by_spares), None)
    if alike is not None:
        return 0, f"a spare would have met the same: {alike.sentence}"
    count = len(missing)
    return count, f"{count} shard(s) found no spare, the last: {missing[-1].sentence}"
