"""Keep PyTorch to the part of a shared device that was leased, and tell how much of it is used.

The caching allocator then raises OutOfMemoryError in the task that takes too much, instead of in a neighbour
that does not. It counts PyTorch's own memory; what the CUDA context and libraries take beside it is allowed
for. Called by `shard`, by a task's function through its lease, and in scripts by `script_site`; `pulse`
reports what is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

#: The memory in MiB that the work may take of its device, the CUDA context included; not set = all of it.
LIMIT_VARIABLE = "GPU_MEMORY_LIMIT_MIB"
#: What a CUDA context and its libraries take: 300 to 500 MiB on common devices.
CONTEXT_MIB = 512
#: Never so little that nothing at all can be allocated.
_LEAST = 0.001


def memory_fraction(limit_mib: int, total_mib: float) -> float:
    """Return the part of a device for the allocator, so that the process as a whole stays in its limit."""
    return min(1.0, max(_LEAST, (limit_mib - CONTEXT_MIB) / total_mib))


def limit_torch_memory(environment: Mapping[str, str] = os.environ) -> float | None:
    """Limit PyTorch on the visible devices by the environment; return the part, None = there is no limit.

    Call it before the first tensor is put on a device: what is allocated already stays.
    """
    limit = environment.get(LIMIT_VARIABLE)
    if limit is None:
        return None
    import torch

    least = None
    for number in range(torch.cuda.device_count()):
        total_mib = torch.cuda.get_device_properties(number).total_memory / 2**20
        fraction = memory_fraction(int(limit), total_mib)
        torch.cuda.set_per_process_memory_fraction(fraction, number)
        least = fraction if least is None else min(least, fraction)
    return least


def limit_once_used() -> None:
    """Limit PyTorch by the environment when it first uses a device, which may be never."""
    import torch

    torch.cuda._lazy_call(limit_torch_memory)  # type: ignore[no-untyped-call]


def change_limit(limit_mib: int) -> None:
    """Let this process have so much of its device from now on, whatever it has allocated already."""
    os.environ[LIMIT_VARIABLE] = str(limit_mib)
    limit_torch_memory()


def used_memory_mib(torch_device: str) -> int:
    """Return the most that this process had of one of its devices, the CUDA context included.

    The memory of a simulated device is the main memory of the process that computes in its place.
    """
    if torch_device == "cpu":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 2**20
    import torch

    devices = range(torch.cuda.device_count())
    most = max((torch.cuda.max_memory_allocated(number) for number in devices), default=0)
    return most // 2**20 + CONTEXT_MIB
