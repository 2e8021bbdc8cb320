"""Read what people know of GPU models that the built-in table lacks, or has otherwise.

JSON: the name as `airflow gpu nodes` shows it, memory, and vendor's TFLOPS by precision, from which the
rating follows as for the models of `flavors`, unless it is given. What is left out of a known model stays.
Wrong text is refused with the entry that is wrong and an example. The next step is `flavors.tflops`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from airflow_gpu_provider.broker.flavors import FLAVORS, Flavor, canonical_model, rating_of
from airflow_gpu_provider.broker.units import parse_mib
from airflow_gpu_provider.exceptions import InvalidRequest

EXAMPLE = '{"RTX PRO 5000": {"memory": "48GiB", "tflops": {"fp32": 65, "fp16": 262}}}'

_FIELDS = ("memory", "tflops", "rating")
_PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")


def parse_flavors(text: str) -> Mapping[str, Flavor]:
    """Return the models that ``text`` describes, by short name; raise InvalidRequest naming what is wrong."""
    if not text.strip():
        return {}
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise _wrong(f"it is no JSON ({error.msg}, character {error.pos + 1})") from error
    if not isinstance(entries, dict):
        raise _wrong("it must be an object, a model for each name")
    return {canonical_model(name): _flavor(name, entry) for name, entry in entries.items() if _named(name)}


def extended(own: Mapping[str, Flavor]) -> Mapping[str, Flavor]:
    """Return the whole table; own entries win."""
    return {**FLAVORS, **own}


def rated(model: str, tflops: float, share: float, own: Mapping[str, Flavor]) -> float:
    """Return the rating of a reported device: the own one, its part of it for a slice, else as reported."""
    known = own.get(model)
    if known is not None:
        return known.rating
    board = own.get(model.partition("-MIG-")[0])
    return tflops if board is None else board.rating * share


def _named(name: str) -> bool:
    if not name.strip():
        raise _wrong("a model has no name")
    return True


def _flavor(name: str, entry: object) -> Flavor:
    if not isinstance(entry, dict):
        raise _wrong(f"{name!r} must be an object")
    unknown = sorted(set(entry) - set(_FIELDS))
    if unknown:
        raise _wrong(f"{name!r} has {', '.join(unknown)}; known are {', '.join(_FIELDS)}")
    model = canonical_model(name)
    known = FLAVORS.get(model)
    speeds = _speeds(name, entry.get("tflops", {}))
    if "rating" in entry:
        rating = _number(f"the rating of {name!r}", entry["rating"])
    elif speeds or known is None:
        rating = _derived(name, speeds)
    else:
        rating = known.rating
    return Flavor(model, _memory(name, entry, known), {**(known.tflops if known else {}), **speeds}, rating)


def _speeds(name: str, given: object) -> dict[str, float]:
    if not isinstance(given, dict):
        raise _wrong(f"tflops of {name!r} must be an object by precision")
    unknown = sorted(set(given) - set(_PRECISIONS))
    if unknown:
        raise _wrong(f"{name!r} has tflops of {', '.join(unknown)}; known are {', '.join(_PRECISIONS)}")
    return {precision: _number(f"{precision} of {name!r}", value) for precision, value in given.items()}


def _derived(name: str, speeds: Mapping[str, float]) -> float:
    tensor = speeds.get("fp16", speeds.get("bf16"))
    if tensor is None and "fp32" not in speeds:
        raise _wrong(f"{name!r} needs tflops of fp16 or fp32, or a rating (A100 = 35, V100 = 15)")
    return rating_of(speeds.get("fp32", 0.0), tensor)


def _memory(name: str, entry: Mapping[str, object], known: Flavor | None) -> int:
    if "memory" not in entry:
        if known is None:
            raise _wrong(f'{name!r} needs its memory, such as "memory": "48GiB"')
        return known.memory_mib
    try:
        return parse_mib(entry["memory"])
    except InvalidRequest as error:
        raise _wrong(f"memory of {name!r}: {error.message}") from error


def _number(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _wrong(f"{what} is {value!r}; it must be a number above 0")
    return float(value)


def _wrong(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"The table of GPU models ([gpu] flavors) cannot be read: {why}. Example: {EXAMPLE}",
        reason="invalid_setting",
    )
