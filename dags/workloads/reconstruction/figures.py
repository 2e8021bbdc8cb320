"""Keep each stage's small figures beside its scratch, so that the report can name what earlier stages did.

Invariant: a missing file means the stage ran elsewhere or not at all, and reads as no figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def write_figures(folder: Path, stage: str, figures: Mapping[str, object]) -> None:
    """Write the figures of ``stage``."""
    (folder / f"{stage}.json").write_text(json.dumps(dict(figures)) + "\n", encoding="utf-8")


def read_figures(folder: Path, stage: str) -> dict[str, object]:
    """Read what ``write_figures`` wrote, empty if nothing was."""
    path = folder / f"{stage}.json"
    if not path.is_file():
        return {}
    figures = json.loads(path.read_text(encoding="utf-8"))
    return figures if isinstance(figures, dict) else {}
