"""Reading what `telemetry` and `observer` wrote, without torch.

For whoever shows or exports metrics; docs/training.md says what the lines hold. After a fault steps are done
again, so the last line of each (shard, step) counts. A process that was killed may have left half a line: it
is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import JsonValue

Line = dict[str, JsonValue]


def read_telemetry(folder: Path) -> Iterator[Line]:
    """Yield the lines of all processes of a run, oldest first, without a half-written last one."""
    lines: list[Line] = []
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                lines.append(json.loads(text))
    yield from sorted(lines, key=lambda line: float(str(line["at"])))
