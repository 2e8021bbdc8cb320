"""What the ranks of a script print, told in the task's log with the rank before each line.

A look takes what is new; of a rank that prints very much the middle is left out, since a task's log is read
by people. Progress bars that rewrite their line are told as they stand. Used by `training_progress`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from airflow_gpu_provider.training.plan import RunPlan

if TYPE_CHECKING:
    from airflow.sdk.types import Logger

_MAX_BYTES = 64 * 1024
_MAX_LINES = 200


class ScriptOutput:
    """The logs of all processes of a run; process number n has rank n modulo the number of ranks."""

    def __init__(self, folder: Path, ranks: int, log: Logger) -> None:
        self._folder = folder
        self._ranks = ranks
        self._log = log
        self._read: dict[Path, int] = {}
        self._rest: dict[Path, str] = {}  #: a line whose end is still to come

    @classmethod
    def of(cls, plan: RunPlan, log: Logger) -> ScriptOutput | None:
        """Return the output of a run, None for one that has no script."""
        return None if plan.script is None else cls(plan.paths.logs, plan.shard_count, log)

    def tell(self) -> None:
        """Tell the whole lines that are new."""
        for path in sorted(self._folder.glob("u*.log"), key=_number):
            text = self._rest.pop(path, "") + self._new(path)
            *lines, self._rest[path] = text.split("\n")
            self._say(path, lines)

    def end(self) -> None:
        """Tell all that is left, at the end of the run."""
        self.tell()
        for path, rest in self._rest.items():
            self._say(path, [rest] if rest else [])
        self._rest.clear()

    def _new(self, path: Path) -> str:
        begin = self._read.get(path, 0)
        size = path.stat().st_size
        if size - begin > _MAX_BYTES:
            self._log.info("[rank %d] ... %d bytes left out, all are in %s", *self._place(path, size - begin))
            begin = size - _MAX_BYTES
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read(size - begin)
        self._read[path] = begin + len(content)
        return content.decode(errors="replace")

    def _place(self, path: Path, size: int) -> tuple[int, int, Path]:
        return _number(path) % self._ranks, size - _MAX_BYTES, path

    def _say(self, path: Path, lines: list[str]) -> None:
        rank = _number(path) % self._ranks
        if len(lines) > _MAX_LINES:
            self._log.info("[rank %d] ... %d lines left out", rank, len(lines) - _MAX_LINES)
        for line in lines[-_MAX_LINES:]:
            self._log.info("[rank %d] %s", rank, line.rstrip("\r").rpartition("\r")[2])


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("u"))
