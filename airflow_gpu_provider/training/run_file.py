"""`run.json`: where a run stands, for everyone outside its processes.

Written by the supervisor only, replaced atomically, so that a reader sees a whole record or the one before.
It holds enough to tell people what happened and a retry where to resume. Readers: the launcher and the
operator.
"""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path

from pydantic import BaseModel, JsonValue

from airflow_gpu_provider.training.failures import ShardFailure
from airflow_gpu_provider.training.pace_record import RunPace, RunSummary, Stall, Straggler

#: a run of weeks keeps its file small
_MAX_NOTES = 50


class RunState(str, Enum):
    """State of a run."""

    STARTING = "starting"
    """Processes import and build their models; no step yet."""
    RUNNING = "running"
    """At least one synchronisation was committed."""
    FINISHING = "finishing"
    """All steps are done and saved; the code after the loop runs."""
    SUCCEEDED = "succeeded"
    """Every shard returned from ``train``."""
    FAILED = "failed"
    """It ended without its result; ``error`` says why."""
    STOPPED = "stopped"
    """It was asked to stop and left a checkpoint where it could."""

    @property
    def is_terminal(self) -> bool:
        """True when the run will never change again."""
        return self in (RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED)


class CheckpointRecord(BaseModel):
    """The newest durable checkpoint."""

    step: int
    path: str
    sha256: str  #: of the file
    state_sha256: str  #: of the weights and the optimizer's state, independent of the file format
    size_bytes: int | None = None
    saved_at: datetime | None = None  #: None: by a version that did not tell
    sync_schedule: list[tuple[int, int]] = []  #: that led to it, as in `NetworkRecord`


class MirrorRecord(BaseModel):
    """How the copying of checkpoints to object storage goes."""

    place: str
    step: int | None  #: of the newest one that lies there whole
    error: str | None
    at: datetime


class Note(BaseModel):
    """Something about a run that people should read."""

    at: datetime
    sentence: str


class NetworkRecord(BaseModel):
    """What was measured between the shards, and what was done about it."""

    latency_ms: float | None = None  #: of the slowest hop of the ring; None: not measured
    relay: str | None = None  #: the process with the least latency to all others
    #: (step, interval): from that synchronisation on so many steps between two; empty: always the plan's
    sync_schedule: list[tuple[int, int]] = []


class ScriptRecord(BaseModel):
    """What is known of a script's run beyond its processes."""

    checkpoint_dir: str
    restarts: int = 0  #: of all its processes together
    saved_at_ns: int = 0  #: when something in that folder changed last; 0 = never in this attempt


class RunRecord(BaseModel):
    """All that run.json says."""

    run_id: str
    pid: int
    state: RunState = RunState.STARTING
    generation: int = 0
    members: dict[str, int] = {}  #: process to logical rank
    spares: list[str] = []
    warm: list[str] = []  #: the spares that could take a rank at once
    step: int = 0  #: the last one that a shard said it had committed
    step_count: int | None = None
    resumed_from: int | None = None
    respawns_left: int = 0
    processes_started: int = 0  #: shards in all, which are numbered in this order
    supervisor_restarts: int = 0  #: after it was lost; each resumed from the last checkpoint
    sync_retries: int = 0
    failures: list[ShardFailure] = []
    suspect_devices: list[str] = []  #: those that gave an error of their own
    takeovers: list[str] = []  #: "u2 took rank 1 of u1 (killed)"
    notes: list[Note] = []  #: the newest of them; readers count from `notes_dropped`
    notes_dropped: int = 0
    pace: RunPace | None = None  #: None: not known yet
    straggler: Straggler | None = None
    stall: Stall | None = None
    summary: RunSummary = RunSummary()
    growths: list[str] = []  #: "shard 0 has taken 7800 MiB of ...: moved from GPU-a to GPU-b"
    network: NetworkRecord = NetworkRecord()
    mirror: MirrorRecord | None = None  #: None: checkpoints stay in their folder
    checkpoint: CheckpointRecord | None = None
    script: ScriptRecord | None = None  #: None: the run of an entrypoint
    result: JsonValue = None  #: what ``train`` returned on rank 0
    error: str | None = None
    hopeless: bool = False  #: the error would come back on a retry
    orphaned: bool = False  #: it stopped because the process that started it was gone
    started_at: datetime
    updated_at: datetime

    def note(self, sentence: str) -> None:
        """Keep a sentence for people, in place of the oldest one where there are too many."""
        self.notes.append(Note(at=datetime.now(timezone.utc), sentence=sentence))
        dropped = max(0, len(self.notes) - _MAX_NOTES)
        self.notes = self.notes[dropped:]
        self.notes_dropped += dropped

    @property
    def is_success(self) -> bool:
        """True when the run has a result, and a checkpoint that holds it or a script that keeps its own."""
        return self.state is RunState.SUCCEEDED and (self.checkpoint is not None or self.script is not None)

    @property
    def unreplaced(self) -> list[ShardFailure]:
        """The lost shards whose rank nobody took, oldest first: each takeover answers one loss."""
        return [failure for failure in self.failures if failure.rank is not None][len(self.takeovers) :]


def write_json(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` at once: a reader or a crash never meets half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # a full disk: half a file takes space that is wanted
        temporary.unlink(missing_ok=True)
        raise


def write_record(path: Path, record: RunRecord) -> None:
    """Write the record with the present time."""
    record.updated_at = datetime.now(timezone.utc)
    write_json(path, record.model_dump_json(indent=1))


def read_mirror(path: Path) -> MirrorRecord | None:
    """Return what the mirror has said last, None when there is none."""
    try:
        return MirrorRecord.model_validate_json(path.read_text())
    except FileNotFoundError:
        return None


def read_record(path: Path) -> RunRecord | None:
    """Return the record, or None when the supervisor has not written one yet."""
    try:
        return RunRecord.model_validate(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
