"""Durable checkpoints: a file of weights and optimizer state, valid once its record lies beside it.

After a synchronisation the state is equal on all shards, so one copy, written by rank 0, is enough. It is
taken while the training pauses and written by a thread while it goes on; never two at once. What cannot be
written (a full disk, a quota) is told in numbers and the checkpoints before stay. Files are read with
``weights_only``: data, never code. Names and checksums: `checkpoint_files`; when to save: `saving`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

import torch

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.checkpoint_files import (
    RECORD_SUFFIX,
    CheckpointFacts,
    CheckpointFiles,
    StoredRecord,
    free_bytes,
    in_mib,
    sha256_of,
    sync_folder,
)
from airflow_gpu_provider.training.run_file import CheckpointRecord, write_json
from airflow_gpu_provider.training.state import TrainingState, digest_of

log = logging.getLogger(__name__)

#: what the file has beside the tensors: names, the record, block sizes
_MARGIN_BYTES = 256 * 1024
_TELL_AGAIN_S = 60.0


class CheckpointNotWritten(Exception):
    """The state could not be saved; the message names the folder, the numbers and the system's reason."""


@dataclass(frozen=True)
class _Copy:
    """The state at one step, apart from the live one where it is to be written by a thread."""

    step: int
    contents: dict[str, object]
    named: list[tuple[str, torch.Tensor]]  #: what the digest is made of
    sync_schedule: list[tuple[int, int]] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.named)


class CheckpointFolder:
    """The checkpoints of one run, the newest ``keep`` of them.

    ``tell`` takes sentences for people: what was passed over, what was removed, what could not be written.
    """

    def __init__(
        self,
        folder: Path,
        facts: CheckpointFacts,
        *,
        keep: int,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.folder = folder
        self._files = CheckpointFiles(folder, tell=tell)
        self._facts = facts
        self._keep = keep
        self._tell = tell
        self._told_at: float | None = None
        self.sync_schedule: list[tuple[int, int]] = []  #: that led to what is saved next
        self._writer: threading.Thread | None = None
        self._written: CheckpointRecord | None = None

    def save(self, state: TrainingState, step: int) -> CheckpointRecord:
        """Write the state now. Raise CheckpointNotWritten."""
        self._wait_for_writer()
        return self._write(self._taken(state, step))

    def save_in_background(self, state: TrainingState, step: int) -> bool:
        """Copy the state and write it in a thread; return False when the last one is still being written."""
        if self._writer is not None and self._writer.is_alive():
            return False
        copy = self._taken(state, step, copy=True)
        self._writer = threading.Thread(
            target=self._write_and_remember, args=(copy,), name="checkpoint", daemon=True
        )
        self._writer.start()
        return True

    def _taken(self, state: TrainingState, step: int, *, copy: bool = False) -> _Copy:
        return replace(_take(state, step, copy=copy), sync_schedule=list(self.sync_schedule))

    def take_written(self) -> CheckpointRecord | None:
        """Return what the background thread has finished since the last call."""
        written, self._written = self._written, None
        return written

    def newest(self) -> CheckpointRecord | None:
        """Return the newest undamaged checkpoint."""
        record = next(self._files.whole(), None)
        if record is None:
            return None
        if record.facts != self._facts:
            log.warning(
                "Checkpoint %s was made with %s and goes on with %s: samples are dealt out differently "
                "from here",
                record.path,
                record.facts,
                self._facts,
            )
        return CheckpointRecord(**record.model_dump(exclude={"facts"}))

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

    def _write_and_remember(self, copy: _Copy) -> None:
        try:
            self._written = self._write(copy)
        except CheckpointNotWritten as error:
            # Training goes on: the checkpoint before is still there, and the final one is written in the
            # open.
            sentence = f"{error} Training goes on, and the next one is tried when it is due."
            if self._told_at is None or time.monotonic() - self._told_at > _TELL_AGAIN_S:
                self._told_at = time.monotonic()
                log.warning("%s", sentence)
                self._tell(sentence)
            return
        if self._told_at is not None:
            self._told_at = None
            self._tell(f"Checkpoints can be written again: that of step {copy.step} is")

    def _write(self, copy: _Copy) -> CheckpointRecord:
        needed = copy.size_bytes + _MARGIN_BYTES
        path = self._files.data_file(copy.step)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._files.make_room(needed)
            record = self._write_files(copy, path, temporary)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
            with contextlib.suppress(OSError):  # the folder itself may be what is wrong
                temporary.unlink()
            raise CheckpointNotWritten(self._why_not(copy.step, needed, error)) from error
        self._files.keep_newest(self._keep, written=copy.step)
        return CheckpointRecord(**record.model_dump(exclude={"facts"}))

    def _write_files(self, copy: _Copy, path: Path, temporary: Path) -> StoredRecord:
        with temporary.open("wb") as file:
            torch.save(copy.contents, file)
            file.flush()
            os.fsync(file.fileno())
        record = StoredRecord(
            step=copy.step,
            path=str(path),
            sha256=sha256_of(temporary),
            state_sha256=digest_of(copy.named),
            size_bytes=temporary.stat().st_size,
            saved_at=datetime.now(timezone.utc),
            sync_schedule=copy.sync_schedule,
            facts=self._facts,
        )
        temporary.replace(path)
        write_json(path.with_suffix(RECORD_SUFFIX), record.model_dump_json(indent=1))
        sync_folder(self.folder)
        return record

    def _why_not(self, step: int, needed: int, error: Exception) -> str:
        reason = " ".join(str(error).split())[:300]
        newest = next((record.stem for record in self._files.record_files()), None)
        left = f"the newest one there, {newest}, is kept" if newest else "none is there yet"
        numbers = f"needed: {in_mib(needed)}, free: {in_mib(free_bytes(self.folder))}"
        return (
            f"The checkpoint of step {step} could not be written to {self.folder}: {reason} ({numbers}); "
            f"{left}. Free space or raise the quota there, lower keep_checkpoints ({self._keep} now) or "
            "choose another checkpoint_dir."
        )

    def _wait_for_writer(self) -> None:
        if self._writer is not None:
            self._writer.join()


def _take(state: TrainingState, step: int, *, copy: bool = False) -> _Copy:
    """Return the state for a file; with ``copy`` each tensor is copied, once, whatever its names are."""
    named = list(state.named_tensors())
    models = [model.state_dict(keep_vars=copy) for model in state.models]
    optimizers = [optimizer.state_dict() for optimizer in state.optimizers]
    contents: dict[str, object] = {"format": 1, "step": step, "models": models, "optimizers": optimizers}
    if not copy:
        return _Copy(step, contents, named)
    copies: dict[int, torch.Tensor] = {}
    named = [(name, _copied_tensor(tensor, copies)) for name, tensor in named]
    return _Copy(step, dict(_copied_items(contents, copies)), named)


def _copied(value: object, copies: dict[int, torch.Tensor]) -> object:
    if isinstance(value, torch.Tensor):
        return _copied_tensor(value, copies)
    if isinstance(value, dict):
        return dict(_copied_items(value, copies))
    if isinstance(value, list | tuple):
        return type(value)(_copied(item, copies) for item in value)
    return value


def _copied_items(values: dict[str, object], copies: dict[int, torch.Tensor]) -> Iterator[tuple[str, object]]:
    for key, item in values.items():
        yield key, _copied(item, copies)


def _copied_tensor(tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    if id(tensor) not in copies:
        copies[id(tensor)] = tensor.detach().to("cpu", copy=True)
    return copies[id(tensor)]
