"""One training at a time writes into a folder.

The task that starts a run takes the folder and hands it to the run's processes as an open file: the kernel
lets go of it when the last of them has ended, however that was. Invariant: whoever holds it is named in the
file. Used by `run_start`; next: `kept_run`, which passes it on.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from pydantic import BaseModel

from airflow_gpu_provider.exceptions import FolderInUse
from airflow_gpu_provider.inventory.host import local_host
from airflow_gpu_provider.training.run_folder import unusable
from airflow_gpu_provider.wire import TaskKey

log = logging.getLogger(__name__)

WRITER = "writer.json"
#: for the last processes of a run that has been told to end; theirs save for ten seconds
_PATIENCE_S = 20.0
_POLL_S = 0.1


class Writer(BaseModel):
    """Who writes into a folder."""

    key: TaskKey
    host: str
    since: datetime


@contextmanager
def sole_writer(root: Path, key: TaskKey, *, patience_s: float = _PATIENCE_S) -> Iterator[int]:
    """Have a folder for oneself, and for those who inherit the open file. Raise FolderInUse."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = os.open(root / WRITER, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise unusable(root, error) from error
    try:
        _take(file, root, time.monotonic() + patience_s)
        writer = Writer(key=key, host=local_host(), since=datetime.now(timezone.utc))
        os.ftruncate(file, 0)
        os.pwrite(file, writer.model_dump_json().encode(), 0)
        yield file
    finally:
        os.close(file)


def _take(file: int, root: Path, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise FolderInUse(_refusal(file, root)) from None
            time.sleep(_POLL_S)
        except OSError as error:  # a file system that knows no locks
            return log.warning("%s is not guarded against a second training: %s", root, error)


def _refusal(file: int, root: Path) -> str:
    try:
        writer = Writer.model_validate_json(os.pread(file, 1 << 16, 0))
    except ValueError:
        holder = "another training"
    else:
        key = writer.key
        mapped = f"[{key.map_index}]" if key.map_index >= 0 else ""
        holder = (
            f"{key.dag_id}.{key.task_id}{mapped} of run {key.run_id} (try {key.try_number}, "
            f"on {writer.host}, since {writer.since:%Y-%m-%d %H:%M:%S} UTC)"
        )
    return (
        f"checkpoint_dir={str(root)!r} is being written by {holder}: two trainings in one folder would spoil "
        "each other's checkpoints. Give each its own, such as '.../{{ run_id }}/{{ ti.map_index }}', leave "
        "checkpoint_dir out, or let only one run at a time (max_active_runs=1); a retry waits for the other."
    )
