"""How a benchmark shows what it found; imports nothing that a measurement could feel."""

from __future__ import annotations

import json
from collections.abc import Mapping


def show(result: Mapping[str, object], *, as_json: bool) -> None:
    """Print one JSON object as the last line, or a line for each name."""
    if as_json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name}: {value}" for name, value in result.items()))
