"""Durable checkpoints: a file of weights and optimizer state, valid once its record lies beside it.

The record (JSON with the file's sha256) is written last and atomically, so a crash leaves the checkpoint
before it. A damaged file is skipped with a log line and the one before it is used. After a synchronisation
the state is equal on all shards, so one copy, written by rank 0, is enough. Files are read with
``weights_only``: data, never code.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from pathlib import Path

import torch
from pydantic import BaseModel, ValidationError

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.run_file import CheckpointRecord, write_json
from airflow_gpu_provider.training.state import TrainingState

log = logging.getLogger(__name__)

_RECORD_SUFFIX = ".json"


class CheckpointNotWritten(Exception):
    """The state could not be saved; the message names the folder and the system's reason."""


class CheckpointFacts(BaseModel):
    """Under which conditions the state was made; data positions depend on them."""

    shard_count: int
    sync_interval: int
    seed: int


class _StoredRecord(CheckpointRecord):
    facts: CheckpointFacts


class CheckpointFolder:
    """The checkpoints of one run, the newest ``keep`` of them."""

    def __init__(self, folder: Path, facts: CheckpointFacts, *, keep: int) -> None:
        self.folder = folder
        self._facts = facts
        self._keep = keep
        self._writer: threading.Thread | None = None
        self._written: CheckpointRecord | None = None

    def save(self, state: TrainingState, step: int) -> CheckpointRecord:
        """Write the state now. Raise CheckpointNotWritten."""
        self._wait_for_writer()
        return self._write(_contents(state, step), step, state.digest())

    def save_in_background(self, state: TrainingState, step: int) -> bool:
        """Copy the state and write it in a thread; return False when the last one is still being written."""
        if self._writer is not None and self._writer.is_alive():
            return False
        contents, digest = _contents(state, step, copy=True), state.digest()
        self._writer = threading.Thread(
            target=self._write_and_remember, args=(contents, step, digest), name="checkpoint", daemon=True
        )
        self._writer.start()
        return True

    def take_written(self) -> CheckpointRecord | None:
        """Return what the background thread has finished since the last call."""
        written, self._written = self._written, None
        return written

    def newest(self) -> CheckpointRecord | None:
        """Return the newest undamaged checkpoint."""
        for path in sorted(self.folder.glob(f"step-*{_RECORD_SUFFIX}"), reverse=True):
            try:
                record = _StoredRecord.model_validate_json(path.read_text())
            except (OSError, ValidationError) as error:
                log.warning("Checkpoint record %s cannot be read (%s); trying the one before", path, error)
                continue
            file = self.folder / Path(record.path).name  # the folder may have been moved
            if not file.exists() or _sha256(file) != record.sha256:
                log.warning("Checkpoint %s is missing or damaged; trying the one before", file)
                continue
            if record.facts != self._facts:
                log.warning(
                    "Checkpoint %s was made with %s and goes on with %s: samples are dealt out differently "
                    "from here",
                    file,
                    record.facts,
                    self._facts,
                )
            fields = record.model_dump(exclude={"facts", "path"})
            return CheckpointRecord(**fields, path=str(file))
        return None

    def load(self, state: TrainingState, record: CheckpointRecord) -> None:
        """Put a checkpoint's values into the state. Raise InvalidRequest when it is of another model."""
        contents = torch.load(record.path, map_location="cpu", weights_only=True)
        try:
            for model, values in zip(state.models, contents["models"], strict=True):
                model.load_state_dict(values)
            for optimizer, values in zip(state.optimizers, contents["optimizers"], strict=True):
                optimizer.load_state_dict(values)
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise InvalidRequest(
                f"The checkpoint {record.path} is of another model or optimizer ({reason}); give this "
                "training a checkpoint_dir of its own, or move the old checkpoints away."
            ) from error

    def _write_and_remember(self, contents: dict[str, object], step: int, digest: str) -> None:
        try:
            self._written = self._write(contents, step, digest)
        except CheckpointNotWritten as error:
            # Training goes on: the checkpoint before is still there, and the final one is written in the
            # open.
            log.warning("%s", error)

    def _write(self, contents: dict[str, object], step: int, digest: str) -> CheckpointRecord:
        path = self.folder / f"step-{step:012d}.pt"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save(contents, file)
                file.flush()
                os.fsync(file.fileno())
            record = _StoredRecord(
                step=step, path=str(path), sha256=_sha256(temporary), state_sha256=digest, facts=self._facts
            )
            temporary.replace(path)
            write_json(path.with_suffix(_RECORD_SUFFIX), record.model_dump_json(indent=1))
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
            with contextlib.suppress(OSError):  # the folder itself may be what is wrong
                temporary.unlink()
            raise CheckpointNotWritten(
                f"The checkpoint of step {step} could not be written to {self.folder}: {error}; free space "
                "there or choose another checkpoint_dir."
            ) from error
        self._remove_old()
        return CheckpointRecord(**record.model_dump(exclude={"facts"}))

    def _remove_old(self) -> None:
        records = sorted(self.folder.glob(f"step-*{_RECORD_SUFFIX}"), reverse=True)
        for record in records[self._keep :]:
            # The record goes first: without it the file is no checkpoint.
            record.unlink(missing_ok=True)
            record.with_suffix(".pt").unlink(missing_ok=True)

    def _wait_for_writer(self) -> None:
        if self._writer is not None:
            self._writer.join()


def _contents(state: TrainingState, step: int, *, copy: bool = False) -> dict[str, object]:
    models = [model.state_dict() for model in state.models]
    optimizers = [optimizer.state_dict() for optimizer in state.optimizers]
    contents: dict[str, object] = {"format": 1, "step": step, "models": models, "optimizers": optimizers}
    return _copied(contents) if copy else contents  # type: ignore[return-value]


def _copied(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
