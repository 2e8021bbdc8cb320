"""Check the small figures that a stage function returns before they enter the ledger.

They become JSON that pages and programs read, so they must be small and plain; NaN and infinity, which JSON
does not have, become None (unknown). Used by `runner`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

#: Figures of a million products are read together; images and arrays belong in files.
MAX_FIGURES_BYTES = 16 * 1024


def checked_figures(returned: object) -> dict[str, object]:
    """Return the figures as plain JSON values, or raise TypeError/ValueError with what to change."""
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"the stage function returned {type(returned).__name__}; allowed: a mapping of names to small "
            "JSON values, or None"
        )
    figures = {str(name): _plain(str(name), value) for name, value in returned.items()}
    size = len(json.dumps(figures).encode())
    if size > MAX_FIGURES_BYTES:
        raise ValueError(
            f"the stage function returned {size} bytes of figures; allowed: {MAX_FIGURES_BYTES}; write big "
            "data to output_dir"
        )
    return figures


def _plain(name: str, value: object) -> object:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    scalar = getattr(value, "item", None)  # numpy and torch scalars
    if callable(scalar) and getattr(value, "ndim", 1) == 0:
        return _plain(name, scalar())
    raise TypeError(
        f"figure {name!r} is a {type(value).__name__}; allowed: numbers, text, booleans, None, lists "
        "and mappings"
    )
