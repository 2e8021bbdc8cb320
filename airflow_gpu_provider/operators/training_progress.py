"""What a training run does, told in the task log.

Follows the run's record and says each change once: takeovers and failures as they happen, step and loss
every few seconds. Returns when the run has ended, or raises when the lease is lost. Used by
`operators.training`.
"""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from airflow_gpu_provider.launchers.base import TrainingRun
from airflow_gpu_provider.operators.script_output import ScriptOutput
from airflow_gpu_provider.training.plan import RunPaths
from airflow_gpu_provider.training.run_file import RunRecord, RunState

if TYPE_CHECKING:
    from airflow.sdk.types import Logger

_POLL_S = 0.5
_STEP_EVERY_S = 5.0
#: a step that stays the same until the next synchronisation is not told again and again
_SAME_STEP_EVERY_S = 60.0
_STATES = {
    RunState.STARTING: "Training is starting: its shards load their code and build their models",
    RunState.RUNNING: "Training is running",
    RunState.FINISHING: "Training has done and saved all its steps; the code after the loop runs",
    RunState.SUCCEEDED: "Training has succeeded",
    RunState.FAILED: "Training has failed",
    RunState.STOPPED: "Training was stopped",
}


def pace_in_words(record: RunRecord) -> str:
    """Return how fast a run is and when it was saved last."""
    saved_at = record.checkpoint.saved_at if record.checkpoint else None
    saved = "no checkpoint yet"
    if record.checkpoint is not None:
        age = (
            ""
            if saved_at is None
            else f", {(datetime.now(timezone.utc) - saved_at).total_seconds():.0f} s old"
        )
        saved = f"checkpoint of step {record.checkpoint.step}{age}"
    if record.pace is None:
        return f"speed N/A, {saved}"
    pace = record.pace
    loss = "N/A" if pace.loss is None else f"{pace.loss:.4g}"
    samples = "" if pace.samples_per_s is None else f", {pace.samples_per_s:g} samples/s"
    return f"loss {loss}, {pace.steps_per_s:g} steps/s{samples}, waiting {pace.waiting_pct:g} %, {saved}"


class ProgressLog:
    """Tells one run."""

    def __init__(
        self, run: TrainingRun, paths: RunPaths, log: Logger, *, output: ScriptOutput | None = None
    ) -> None:
        self._run = run
        self._paths = paths
        self._log = log
        self._output = output
        self._failures_told = 0
        self._takeovers_told = 0
        self._notes_told = 0
        self._state: RunState | None = None
        self._step_told_at = 0.0
        self._step_told: int | None = None
        self._lost: tuple[float, int, int] | None = None  #: when a loss was seen, its generation and step

    def skip_the_past(self) -> None:
        """Tell what an earlier try of the task has told as one line; from now on only what is new."""
        record = self._run.record()
        if record is None:
            return
        self._failures_told = len(record.failures)
        self._takeovers_told = len(record.takeovers)
        self._notes_told = record.notes_dropped + len(record.notes)
        if record.failures or record.takeovers:
            self._log.info(
                "Before this try: %d loss(es) and %d takeover(s), up to generation %d; %s tells them",
                len(record.failures),
                len(record.takeovers),
                record.generation,
                self._paths.run,
            )

    def follow(self) -> RunRecord | None:
        """Return the last record of the run once it has ended, None when it has not written any."""
        while True:
            has_ended = self._run.has_ended()  # asked first: the record read after it is the last one
            record = self._run.record()
            if self._output is not None:
                self._output.tell()
            if record is not None:
                self._tell(record)
            if has_ended:
                return record
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Tell what a script has printed since, also while it was being stopped."""
        if self._output is not None:
            self._output.end()

    def _tell(self, record: RunRecord) -> None:
        if self._state is not None and len(record.failures) > self._failures_told:
            self._lost = self._lost or (time.monotonic(), record.generation, record.step)
        for failure in record.failures[self._failures_told :]:
            lines = "\n".join(f"    {line}" for line in self._run.shard_log_tail(failure.uid))
            self._log.warning("%s; its last lines:\n%s", failure.sentence, lines or "    (none)")
        self._failures_told = len(record.failures)
        for number, takeover in enumerate(record.takeovers[self._takeovers_told :], self._takeovers_told + 1):
            # Only the newest is known to have led to the present generation.
            is_newest = number == len(record.takeovers)
            generation = f", generation {record.generation}" if is_newest else ""
            self._log.info("Takeover: %s%s", takeover, generation)
        self._takeovers_told = len(record.takeovers)
        for note in record.notes[max(0, self._notes_told - record.notes_dropped) :]:
            self._log.warning("%s", note.sentence)
        self._notes_told = record.notes_dropped + len(record.notes)
        if record.state is not self._state:
            self._log.info("%s", _STATES[record.state])
            if self._state is None and record.resumed_from is not None:
                self._log.info("Resumed from the checkpoint of step %d", record.resumed_from)
            self._state = record.state
        self._tell_recovery(record)
        self._tell_step(record)

    def _tell_recovery(self, record: RunRecord) -> None:
        """Tell how long after a loss the shards synchronised again, as far as this process saw it."""
        if self._lost is None:
            return
        since, generation, step = self._lost
        if record.state.is_terminal or record.step > step:
            self._lost = None
        if record.state is not RunState.FAILED and record.step > step:
            self._log.info(
                "Training goes on in generation %d: step %d was synchronised %.1f s after the loss was seen",
                max(generation, record.generation),
                record.step,
                time.monotonic() - since,
            )

    def _tell_step(self, record: RunRecord) -> None:
        now = time.monotonic()
        if (
            record.script is not None
            or record.state is not RunState.RUNNING
            or now - self._step_told_at
            < (_SAME_STEP_EVERY_S if record.step == self._step_told else _STEP_EVERY_S)
        ):
            return
        self._step_told_at, self._step_told = now, record.step
        self._log.info("Step %d of %s, %s", record.step, record.step_count or "?", pace_in_words(record))
