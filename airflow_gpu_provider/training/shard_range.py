"""The number of devices that an elastic run may have, as an author writes it.

Free of torch and pydantic, since a DAG file is checked with it. Used by `slots` and `elastic`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from airflow_gpu_provider.exceptions import InvalidRequest

_TEXT = re.compile(r"\s*(\d+)\s*-\s*(\d+)\s*")


@dataclass(frozen=True, slots=True)
class ShardRange:
    """How many devices an elastic run has; ``most`` is also the number of its shards."""

    least: int
    most: int

    @property
    def text(self) -> str:
        """The range as an author writes it."""
        return f"{self.least}-{self.most}"

    @property
    def sharers(self) -> int:
        """How many shards have to fit on one device."""
        return math.ceil(self.most / self.least)


def shard_range(value: object) -> ShardRange | None:
    """Return the range that (2, 4), "2-4" or {"min": 2, "max": 4} means; None for anything of another form.

    Raise InvalidRequest for one that cannot be.
    """
    match value:
        case str() if found := _TEXT.fullmatch(value):
            bounds: tuple[object, object] = (int(found[1]), int(found[2]))
        case [least, most] if not isinstance(value, str):
            bounds = (least, most)
        case {"min": least, "max": most, **rest} if not rest:
            bounds = (least, most)
        case _:
            return None
    least, most = bounds
    if not _is_whole(least) or not _is_whole(most) or not 1 <= least <= most <= 4096:  # type: ignore[operator]
        raise InvalidRequest(
            f"shard_count={value!r}: the least and the most number of devices are whole numbers from 1 to "
            '4096, the least first, for example (2, 4), "2-4" or {"min": 2, "max": 4}.'
        )
    return ShardRange(least, most)  # type: ignore[arg-type]


def check_start(gpus: int, shards: ShardRange) -> None:
    """Refuse a lease that is not within the range."""
    if not shards.least <= gpus <= shards.most:
        raise InvalidRequest(
            f"shard_count={shards.text} is a range of devices and {gpus} GPU(s) are asked for; set gpus (in "
            f"a task request gpu.count) to {shards.least}: more join while they are idle."
        )


def check_elastic(shards: ShardRange, *, script: object, backend: str, is_shared: bool) -> None:
    """Refuse what cannot take and give back devices while it trains; say what to do instead."""
    if script is not None:
        raise InvalidRequest(
            f"shard_count={shards.text} with script=: a plain script keeps the number of its ranks; give one "
            f"number, for example shard_count={shards.least}, or use entrypoint=, where shards can move."
        )
    if backend == "nccl":
        raise InvalidRequest(
            f"backend='nccl' with shard_count={shards.text}: NCCL allows one rank per GPU, and an elastic "
            "run has several on one while it has few; use backend='auto' or 'gloo', or one number of shards."
        )
    if is_shared:
        raise InvalidRequest(
            f"shard_count={shards.text} on a share of a GPU: an elastic run takes whole devices and gives "
            "them back; leave shared and share out, or give one number of shards."
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
