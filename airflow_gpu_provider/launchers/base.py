"""What an operator needs of a launcher.

A launcher starts a supervisor for a plan, wherever that is, and hands back a run to watch. The run's truth
is its record (`training.run_file`), so a launcher adds no state of its own. Implementations: `local`.
"""

from __future__ import annotations

from typing import Protocol

from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.run_file import RunRecord


class TrainingRun(Protocol):
    """A run that was started."""

    def record(self) -> RunRecord | None:
        """Return where the run stands, None while it has not said anything."""

    def has_ended(self) -> bool:
        """Say whether no process of the run is left."""

    def shard_log_tail(self, uid: str) -> list[str]:
        """Return the last lines a shard printed."""

    def explain_end(self) -> str:
        """Say how the run's supervisor ended, for a run whose record does not."""

    def stop(self) -> None:
        """Let the shards save, then end the run; return when it has ended. May be repeated."""

    def kill(self) -> None:
        """End all processes of the run now: their devices are no longer ours. May be repeated."""


class Launcher(Protocol):
    """Starts runs."""

    def start(self, plan: RunPlan) -> TrainingRun:
        """Start a run. Raise InvalidRequest when it can never start here."""
