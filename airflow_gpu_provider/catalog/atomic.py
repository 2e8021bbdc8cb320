"""Change files so that a crash at any byte leaves the old or the new content, never a mixture.

The rule: write beside the target, flush to disk, rename over it. A process that dies releases its guard by
itself (`flock`), so nothing has to be cleaned up by hand. Used by `ledger`, `publish`, `plan` and `summary`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

#: Short against any stage, long against the cost of a system call.
GUARD_POLL_S = 0.5


def write_json(path: Path, content: Mapping[str, object], *, indent: int | None = None) -> None:
    """Replace the file with this content."""
    write_text(path, json.dumps(content, indent=indent, allow_nan=False, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace the file with this text."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary file to fill; on success it takes the place of ``path``, else it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The process id keeps two writers of one target apart; the last rename wins, each file is whole.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until the file's content is on disk, so that a rename cannot outlive it in a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def guarded(path: Path, check: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the file alone; while another process holds it, call ``check`` (which may raise) and wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if check is not None:
                    check()
                time.sleep(GUARD_POLL_S)
        yield
