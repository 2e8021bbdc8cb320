"""Copies a run's checkpoints to object storage, in a process of its own that outlives a killed worker.

Shards write to a local folder, fast and atomically; this copies the newest whole checkpoint from there, never
two at once. Object stores cannot rename, so the data go first and the record with their sha256 last: without
it there is no checkpoint. Credentials come through a pipe (`operators.checkpoint_storage` resolves them where
Airflow is) and are nowhere else. An upload that fails is told, and tried again; training goes on.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from airflow_gpu_provider.training.checkpoint_files import (
    DATA_SUFFIX,
    RECORD_SUFFIX,
    CheckpointFiles,
    StoredRecord,
    sha256_of,
)
from airflow_gpu_provider.training.parenthood import name_process
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.process_identity import started_at
from airflow_gpu_provider.training.run_file import MirrorRecord, read_record, write_json

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

log = logging.getLogger(__name__)

_POLL_S = 1.0
#: from the mirror's start to run.json, and from a lost supervisor to the next one
_STARTING_S, _REPLACING_S = 600.0, 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 120.0


class RemoteFolder:
    """The checkpoints at ``root`` of a file system."""

    def __init__(self, filesystem: AbstractFileSystem, root: str) -> None:
        self._filesystem = filesystem
        self.root = root.rstrip("/")

    def upload(self, record_file: Path) -> None:
        """Copy a local checkpoint; it counts once its record, written last, is there."""
        data = record_file.with_suffix(DATA_SUFFIX)
        self._filesystem.put_file(str(data), self._path(data.name))
        self._filesystem.invalidate_cache()
        found, size = self._filesystem.info(self._path(data.name))["size"], data.stat().st_size
        if found != size:
            raise OSError(f"{self._path(data.name)} has {found} bytes after an upload of {size}")
        self._filesystem.pipe_file(self._path(record_file.name), record_file.read_bytes())

    def holds(self, record_file: Path) -> bool:
        """Say whether a local checkpoint lies there too, as far as its record and its size tell."""
        try:
            there = StoredRecord.model_validate_json(self._filesystem.cat_file(self._path(record_file.name)))
            here = StoredRecord.model_validate_json(record_file.read_text())
            data = record_file.with_suffix(DATA_SUFFIX)
            size = self._filesystem.info(self._path(data.name))["size"]
        except (FileNotFoundError, ValidationError):
            return False
        return bool(there.sha256 == here.sha256 and size == data.stat().st_size)

    def download_newest(self, folder: Path, *, after: int, tell: Callable[[str], None]) -> int | None:
        """Copy the newest whole checkpoint of a step later than ``after``; return its step."""
        for name in self.records():
            if step_of(name) <= after:
                return None
            problem = self._download(name, folder)
            if problem is None:
                return step_of(name)
            tell(f"Checkpoint {self._path(name)} {problem}; trying the one before")
        return None

    def records(self) -> list[str]:
        """Return the names of all records, the newest first."""
        return sorted((name for name in self._names() if name.endswith(RECORD_SUFFIX)), reverse=True)

    def keep_newest(self, count: int, *, written: str) -> None:
        """Remove older checkpoints, records first, and data of uploads that broke off before those kept.

        Those of later steps than the record ``written`` are removed too: the run found them damaged.
        """
        records = self.records()
        later = [name for name in records if step_of(name) > step_of(written)]
        kept = {Path(name).stem for name in records[len(later) :][:count]}
        for name in (*later, *records[len(later) + count :]):
            self._filesystem.rm_file(self._path(name))
        for name in self._names():
            if name.endswith(DATA_SUFFIX) and Path(name).stem < min(kept, default=""):
                self._filesystem.rm_file(self._path(name))

    def copy_to(self, other: RemoteFolder) -> None:
        """Copy everything into another folder of the same file system."""
        for name in self._names():
            self._filesystem.cp_file(self._path(name), other._path(name))

    def clear(self) -> None:
        """Remove everything, records first."""
        for name in sorted(self._names(), key=lambda name: not name.endswith(RECORD_SUFFIX)):
            self._filesystem.rm_file(self._path(name))

    def _download(self, name: str, folder: Path) -> str | None:
        """Copy one checkpoint; say what is wrong with it, None when it is whole."""
        try:
            record = StoredRecord.model_validate_json(self._filesystem.cat_file(self._path(name)))
        except ValidationError:
            return "has a damaged record"
        folder.mkdir(parents=True, exist_ok=True)
        data = folder / Path(name).with_suffix(DATA_SUFFIX).name
        temporary = data.with_suffix(".tmp")
        try:
            self._filesystem.get_file(self._path(data.name), str(temporary))
        except FileNotFoundError:
            return "is missing"
        if sha256_of(temporary) != record.sha256:
            temporary.unlink()
            return "is damaged (its sha256 is another)"
        temporary.replace(data)
        local = record.model_copy(update={"path": str(data)})
        write_json(folder / name, local.model_dump_json(indent=1))
        return None

    def _names(self) -> list[str]:
        self._filesystem.invalidate_cache()
        try:
            paths = self._filesystem.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        return [name for name in (Path(str(path)).name for path in paths) if name.startswith("step-")]

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"


class Mirror:
    """Keeps a remote folder like a local one."""

    def __init__(self, plan: RunPlan, remote: RemoteFolder) -> None:
        self._files = CheckpointFiles(plan.checkpoint_dir)
        self._keep = plan.keep_checkpoints
        self._status_file = plan.paths.mirror
        self._remote = remote
        self._step: int | None = None  #: the newest that lies there whole; None = not looked yet
        self._pause_s, self._next_at = _FIRST_PAUSE_S, 0.0

    def run(self, is_over: Callable[[], bool]) -> None:
        """Copy what is new until the run is over, and then what it left."""
        while not is_over():
            if time.monotonic() >= self._next_at:
                self.copy_newest()
            time.sleep(_POLL_S)
        self.copy_newest()

    def copy_newest(self) -> None:
        """Copy the newest checkpoint unless it was; a failure is told, never raised."""
        newest = next(iter(self._files.record_files()), None)
        if newest is None or (self._step is not None and step_of(newest.name) <= self._step):
            return
        try:
            if self._is_there_already(newest):
                return
            self._remote.upload(newest)
            self._remote.keep_newest(self._keep, written=newest.name)
        except Exception as error:  # whatever a storage's client raises: training must not end by it
            if not newest.exists():
                return  # a newer one has replaced it meanwhile
            log.warning("%s could not be copied to %s", newest.stem, self._remote.root, exc_info=True)
            self._next_at = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self._tell(f"{newest.stem} could not be copied to {self._remote.root} ({reason}); tried again")
            return
        self._step, self._pause_s = step_of(newest.name), _FIRST_PAUSE_S
        self._tell(None)

    def _is_there_already(self, newest: Path) -> bool:
        """Look once what an earlier run has left there: what is damaged there does not count, however new."""
        if self._step is None:
            there = (step_of(each.name) for each in self._files.record_files() if self._remote.holds(each))
            self._step = next(there, -1)
        return step_of(newest.name) <= self._step

    def _tell(self, error: str | None) -> None:
        step = None if self._step is None or self._step < 0 else self._step
        status = MirrorRecord(place=self._remote.root, step=step, error=error, at=datetime.now(timezone.utc))
        write_json(self._status_file, status.model_dump_json())


def step_of(name: str) -> int:
    """Return the step in a checkpoint's file name."""
    return int(Path(name).stem.removeprefix("step-"))


class RunWatch:
    """Says when a run is over: by its record, or since no supervisor of it lives any more."""

    def __init__(self, plan: RunPlan) -> None:
        self._run_file = plan.paths.run
        self._supervisor: tuple[int, str | None] = (0, None)  #: its number, and when that one was started
        self._alive_at = time.monotonic()

    def is_over(self) -> bool:
        """Say whether nothing more is to come. A lost supervisor is replaced in a moment, by another one."""
        record = read_record(self._run_file)
        if record is not None and record.state.is_terminal:
            return True
        if record is not None and self._lives(record.pid):
            self._alive_at = time.monotonic()
        return time.monotonic() - self._alive_at > (_STARTING_S if record is None else _REPLACING_S)

    def _lives(self, pid: int) -> bool:
        """Say whether the supervisor that has written this number lives, and not another process by now."""
        if pid != self._supervisor[0]:
            self._supervisor = (pid, started_at(pid))
        started = self._supervisor[1]
        return started is not None and started_at(pid) == started


def main(handed: dict[str, Any]) -> None:
    """Copy the checkpoints of one run."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    name_process("mirror")
    from fsspec import AbstractFileSystem

    plan = RunPlan.model_validate(handed["plan"])
    filesystem = AbstractFileSystem.from_json(json.dumps(handed["filesystem"]))
    Mirror(plan, RemoteFolder(filesystem, handed["root"])).run(RunWatch(plan).is_over)


if __name__ == "__main__":
    main(json.loads(sys.stdin.read()))
