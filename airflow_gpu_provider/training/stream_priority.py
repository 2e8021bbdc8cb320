"""Who goes first on a device that others use too: the priority of a task's CUDA stream.

A stream of high priority gets the multiprocessors first as they become free; kernels that run already are not
broken off. CUDA compares the streams of one process, and those of several where NVIDIA's MPS serves them;
without it processes take turns, whatever their streams say. `shard` puts the author's function on one; a
task's function may do the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from airflow_gpu_provider.exceptions import InvalidRequest

log = logging.getLogger(__name__)

Priority = Literal["auto", "high", "normal"]
#: as CUDA counts: smaller numbers go first
HIGH, NORMAL = -1, 0


def check_priority(priority: object) -> Priority:
    """Return a valid ``stream_priority``, else raise InvalidRequest."""
    if priority in ("auto", "high", "normal"):
        return priority
    raise InvalidRequest(
        f"stream_priority={priority!r}: allowed are 'high', 'normal', or 'auto' (high for a task of a value "
        "above 0 that shares its device)."
    )


def stream_priority(priority: Priority, *, value: float, is_shared: bool) -> int:
    """Return the priority that a task's stream has; alone on its device nothing has to go first."""
    is_high = priority == "high" or (priority == "auto" and is_shared and value > 0)
    return HIGH if is_high else NORMAL


@contextmanager
def prioritised_stream(priority: int = HIGH, *, torch_device: str = "cuda:0") -> Iterator[int]:
    """Let a block compute on a stream of this priority; yield the one it has, which is 0 without a GPU.

    What was queued before comes first, and what is queued in the block comes before what follows it.
    """
    if priority == NORMAL:
        yield NORMAL
        return
    import torch

    if torch.device(torch_device).type != "cuda" or not torch.cuda.is_available():
        log.info("The stream priority %d has no effect: %s has no CUDA streams", priority, torch_device)
        yield NORMAL
        return
    before = torch.cuda.current_stream(torch_device)
    stream = torch.cuda.Stream(torch_device, priority=priority)  # type: ignore[no-untyped-call]
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield priority
    before.wait_stream(stream)
