"""The names that may stand in section `[gpu]`: a typo must not silently leave an option as it was."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from airflow_gpu_provider.exceptions import InvalidRequest

#: How Airflow names an option whose value a command or a secrets backend tells.
_BY_OTHERS = ("_cmd", "_secret")


def refuse_unknown(names: Iterable[str], known: Collection[str]) -> None:
    """Raise InvalidRequest for the first name that is no option, with the one that was meant."""
    for name in sorted(names):
        if any(option in known for option in (name, *(name.removesuffix(end) for end in _BY_OTHERS))):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        meant = f"did you mean {near[0]}?" if near else f"the options are {', '.join(sorted(known))}."
        raise InvalidRequest(f"[gpu] has no option {name}; {meant}", reason="invalid_setting")
