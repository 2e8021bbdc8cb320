"""Reading what `telemetry` wrote, without torch.

For the operator's log and for whoever exports metrics. After a fault steps are done again, so the last line
of each (shard, step) counts. A process that was killed may have left half a line: it is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import JsonValue

Line = dict[str, JsonValue]

_TAIL_BYTES = 4096


def read_telemetry(folder: Path) -> Iterator[Line]:
    """Yield the lines of all processes of a run, oldest first, without a half-written last one."""
    lines: list[Line] = []
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                lines.append(json.loads(text))
    yield from sorted(lines, key=lambda line: float(str(line["at"])))


def last_report(path: Path) -> Line | None:
    """Return the newest line of one process with what the author reported, None when there is none yet."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            texts = file.read().decode(errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return None
    for text in reversed(texts):
        if text.startswith("{") and text.endswith("}\n"):
            line: Line = json.loads(text)
            if line["kind"] == "report":
                return line
    return None
