"""The files of checkpoints in one folder: which are whole, which may go, and what fits.

A checkpoint is two files: the data, and beside it a record with the data's sha256 that is written last, so
that a crash leaves the checkpoint before it. Invariant: the newest whole checkpoint is never removed.
Without torch, because whoever copies checkpoints elsewhere needs none. Next: `checkpoint` writes and loads
them.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError

from airflow_gpu_provider.training.run_file import CheckpointRecord

log = logging.getLogger(__name__)

RECORD_SUFFIX = ".json"
DATA_SUFFIX = ".pt"
#: a file that nobody has written to for so long was left by a process that is gone
_ABANDONED_S = 60.0


class CheckpointFacts(BaseModel):
    """Under which conditions the state was made; data positions depend on them."""

    shard_count: int
    sync_interval: int
    seed: int


class StoredRecord(CheckpointRecord):
    """What lies beside the data."""

    facts: CheckpointFacts


class CheckpointFiles:
    """The checkpoints that lie in ``folder``."""

    def __init__(self, folder: Path, *, tell: Callable[[str], None] = lambda sentence: None) -> None:
        self.folder = folder
        self._tell = tell

    def data_file(self, step: int) -> Path:
        """Return where the data of ``step`` belong."""
        return self.folder / f"step-{step:012d}{DATA_SUFFIX}"

    def record_files(self) -> list[Path]:
        """Return all records, the newest first."""
        return sorted(self.folder.glob(f"step-*{RECORD_SUFFIX}"), reverse=True)

    def whole(self) -> Iterator[StoredRecord]:
        """Yield the undamaged checkpoints, the newest first, and tell of each one that is passed over."""
        for path in self.record_files():
            try:
                record = StoredRecord.model_validate_json(path.read_text())
            except (OSError, ValidationError) as error:
                reason = " ".join(str(error).split())[:200]
                self._skip(f"Checkpoint record {path} cannot be read ({reason}); trying the one before")
                continue
            file = self.folder / Path(record.path).name  # the folder may have been moved
            if (damage := damage_of(file, record.sha256)) is not None:
                self._skip(f"Checkpoint {file} {damage}; trying the one before")
                continue
            yield record.model_copy(update={"path": str(file)})

    def keep_newest(self, count: int, *, written: int) -> None:
        """Remove all but the newest ``count`` checkpoints up to the step that was just ``written``.

        Those of later steps are removed too: the run resumed from before them because they are damaged.
        """
        last = self.data_file(written).stem
        records = self.record_files()
        later = [record for record in records if record.stem > last]
        for record in (*later, *records[len(later) + count :]):
            remove_checkpoint(record)

    def make_room(self, needed: int) -> None:
        """Remove older checkpoints until ``needed`` bytes are free. Raise OSError when they never are.

        Only when the disk is short, and never the newest whole one.
        """
        self.remove_abandoned()
        if not self._lacks(needed):
            return
        newest = next(self.whole(), None)
        for record in reversed(self.record_files()):  # the oldest first
            if newest is None or record.stem == Path(newest.path).stem or not self._lacks(needed):
                break
            self._tell(f"The disk is nearly full: the checkpoint {record.stem} is removed to make room")
            remove_checkpoint(record)
        if self._lacks(needed):  # not tried: it would take the last space from everyone else on this disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))

    def _lacks(self, needed: int) -> bool:
        free = free_bytes(self.folder)
        return free is not None and free < needed

    def remove_abandoned(self) -> None:
        """Remove what processes that were killed while they wrote have left."""
        recorded = {path.stem for path in self.record_files()}
        halves = [path for path in self.folder.glob(f"step-*{DATA_SUFFIX}") if path.stem not in recorded]
        for path in (*self.folder.glob("step-*.tmp"), *halves):
            try:
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()
            except FileNotFoundError:
                continue  # whoever wrote it has just finished or removed it

    def _skip(self, sentence: str) -> None:
        log.warning("%s", sentence)
        self._tell(sentence)


def remove_checkpoint(record: Path) -> None:
    """Remove a checkpoint; the record goes first, since without it the data are none."""
    record.unlink(missing_ok=True)
    record.with_suffix(DATA_SUFFIX).unlink(missing_ok=True)


def damage_of(file: Path, sha256: str) -> str | None:
    """Say what is wrong with a data file, None when it is whole."""
    try:
        found = sha256_of(file)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    if found != sha256:
        return f"is damaged (sha256 {found[:12]}..., recorded {sha256[:12]}...)"
    return None


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def free_bytes(folder: Path) -> int | None:
    """Return what the disk of ``folder`` has left for us; a quota of this user may be smaller."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def in_mib(size: int | None) -> str:
    """Return a number of bytes for people."""
    return "N/A" if size is None else f"{size / 2**20:.1f} MiB"


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash of the machine, as fsync does for a file's content."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
