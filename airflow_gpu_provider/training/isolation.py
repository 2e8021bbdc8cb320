"""What a shard process may see of the machine: its own devices, by UUID, and its part of a shared one.

UUIDs, because indexes differ between NVML and CUDA; the bus order is set as well for code that counts
devices. A MIG slice is a device with a UUID of its own. A simulated device hides every real one, so that its
work runs on the CPU. Nothing in a driver keeps a process to its part of a device by itself: NVIDIA's MPS does
when it runs, PyTorch when it is told (`memory_limit`). Used by `slots`, and by operators for their own work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from airflow_gpu_provider.training.memory_limit import LIMIT_VARIABLE

_MPS_FOLDER = "/tmp/nvidia-mps"
_MPS_MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_MPS_THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_LIMITS = frozenset({LIMIT_VARIABLE, _MPS_MEMORY, _MPS_THREADS})


class LeasedDevice(Protocol):
    """What is used of a leased device."""

    @property
    def id(self) -> str:
        """Its UUID."""

    @property
    def simulated(self) -> bool:
        """True when its work runs on the CPU."""

    @property
    def memory_mib(self) -> int:
        """All the memory that the device has."""

    @property
    def milli(self) -> int:
        """What is leased of it, in thousandths."""

    @property
    def memory_limit_mib(self) -> int | None:
        """The memory that the work may use; None = all of it, the device is not shared."""


def device_environment(devices: Sequence[LeasedDevice]) -> dict[str, str]:
    """Return the variables that show exactly these devices to CUDA, and their limits."""
    return {
        **visible_devices(devices),
        **share_limits(devices),
        # NCCL's default tears the process down when a peer is lost; survivors have to live on.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }


def visible_devices(devices: Sequence[LeasedDevice]) -> dict[str, str]:
    """Return the variables by which CUDA sees these devices alone."""
    real = ",".join(device.id for device in devices if not device.simulated)
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": real,
        "NVIDIA_VISIBLE_DEVICES": real or "void",
    }


def memory_limit_mib(devices: Sequence[LeasedDevice]) -> int | None:
    """Return the memory that the work may use on each of these devices; None = all of it."""
    return min((limit for device in devices if (limit := device.memory_limit_mib) is not None), default=None)


def share_limits(devices: Sequence[LeasedDevice]) -> dict[str, str]:
    """Return what tells the work, and MPS where it runs, its part of shared devices; empty for whole ones."""
    limit = memory_limit_mib(devices)
    if limit is None:
        return {}
    limits, real = {LIMIT_VARIABLE: str(limit)}, [device for device in devices if not device.simulated]
    if real and _mps_runs():
        # By the order in which the process sees its devices.
        memory = (f"{number}={device.memory_limit_mib or limit}M" for number, device in enumerate(real))
        limits[_MPS_MEMORY] = ",".join(memory)
        limits[_MPS_THREADS] = str(max(1, min(d.milli for d in real) // 10))
    return limits


def without_limits(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the limits of a place that may have been another."""
    return {name: value for name, value in environment.items() if name not in _LIMITS}


def _mps_runs() -> bool:
    """Tell whether NVIDIA's MPS daemon serves this machine, by its control pipe."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_FOLDER, "control").exists()
