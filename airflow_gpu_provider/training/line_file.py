"""JSON lines in a file that stays small: when it is full it becomes the older half of what is kept.

So a run of weeks keeps its newest lines and never fills its disk: at most two files of ``max_bytes`` for each
writer. One writer for each path. Next: `measurements` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import JsonValue

#: some hours of one process at a line or two a second
_MAX_BYTES = 4 * 2**20
_OLDER = ".older.jsonl"


class LineFile:
    """One writer's lines."""

    def __init__(self, path: Path, *, max_bytes: int = _MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def append(self, lines: Iterable[Mapping[str, JsonValue]]) -> None:
        """Write lines at the end. Raise OSError."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        if not text:
            return
        with self.path.open("a") as file:
            file.write(text)
            size = file.tell()
        if size > self._max_bytes:
            self.path.replace(self.path.with_suffix(_OLDER))


def keep_newest_files(folder: Path, count: int) -> None:
    """Remove the files of processes that ended long ago, but for the newest ``count`` files."""
    files = sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in files[count:]:
        path.unlink(missing_ok=True)
