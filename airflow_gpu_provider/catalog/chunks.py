"""Cut ordered products into chunks: pure functions of numbers.

Every product is in exactly one chunk, hot products are in the first, and there are never more than
`MAX_CHUNKS` chunks, because each is a mapped Airflow task (a few hundred mapped tasks already slow a
scheduler). A chunk is a pointer into the plan's file, so it stays below 1 KiB in XCom. Next step: `plan`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from airflow_gpu_provider.exceptions import InvalidRequest

MAX_CHUNKS = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of products of a plan, as it travels through XCom."""

    index: int
    plan: str  #: path of the plan's header
    offset: int  #: where the first product's line begins
    count: int
    value: float  #: the highest value of its products; decides who gets GPUs first
    label: str = ""

    def as_xcom(self) -> dict[str, int | float | str]:
        """Return plain values."""
        return {
            "index": self.index,
            "plan": self.plan,
            "offset": self.offset,
            "count": self.count,
            "value": self.value,
            "label": self.label,
        }

    @classmethod
    def from_xcom(cls, raw: object) -> Chunk:
        """Read what `as_xcom` wrote; refuse anything else with a sentence."""
        if not isinstance(raw, Mapping):
            raise InvalidRequest(
                f"chunk must be one element of what the plan returned (a mapping), got {type(raw).__name__}; "
                "use `.expand(chunk=...)` or a mapped task group"
            )
        try:
            return cls(
                index=int(raw["index"]),
                plan=str(raw["plan"]),
                offset=int(raw["offset"]),
                count=int(raw["count"]),
                value=float(raw["value"]),
                label=str(raw.get("label", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"chunk {dict(raw)!r:.200} is not what the plan returned ({error!r}); allowed keys: "
                "index, plan, offset, count, value, label"
            ) from error


def value_order(values: Sequence[float]) -> list[int]:
    """Return the positions by falling value; equal values keep the order of the file."""
    return sorted(range(len(values)), key=lambda position: -values[position])


def effective_chunk_size(products: int, chunk_size: int, *, max_chunks: int = MAX_CHUNKS) -> int:
    """Return the size that keeps the number of chunks within `max_chunks`."""
    return max(chunk_size, -(-products // max_chunks))


def chunk_bounds(products: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of each chunk."""
    for first in range(0, products, size):
        yield first, min(size, products - first)


def positive_int(name: str, value: object) -> int:
    """Check a count given by a person or a form; say what is allowed when it is not one."""
    text = str(value).strip()
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or int(text) < 1:
        raise InvalidRequest(f"{name}={value!r}; allowed: a whole number of 1 or more")
    return int(text)


def positive_number(name: str, value: object) -> float:
    """Check a factor given by a person or a form; say what is allowed when it is not one."""
    try:
        number = math.nan if isinstance(value, bool) else float(str(value))
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number <= 0:
        raise InvalidRequest(f"{name}={value!r}; allowed: a number above 0, like 1 or 2.5")
    return number
