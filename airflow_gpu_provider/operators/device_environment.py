"""The environment of work on leased devices: which ones CUDA shows, and how much of a shared one is its own.

Devices are named by UUID, since NVML and CUDA number them differently; a simulated device hides every real
one. Nothing in a driver keeps a process to its part of a shared device by itself: NVIDIA's MPS does when it
runs, PyTorch when it is told (`training.memory_limit`). Used by `held_lease`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from airflow_gpu_provider.inventory.lease_mark import LEASE_VARIABLE
from airflow_gpu_provider.training.memory_limit import LIMIT_VARIABLE
from airflow_gpu_provider.wire import DeviceView

_MPS_FOLDER = "/tmp/nvidia-mps"


def environment_of(lease_id: str, devices: Iterable[DeviceView]) -> dict[str, str]:
    """Return the variables for a process that works on these devices."""
    devices = tuple(devices)
    real = [device for device in devices if not device.simulated]
    visible = ",".join(device.id for device in real)
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": visible,
        "NVIDIA_VISIBLE_DEVICES": visible or "void",
        LEASE_VARIABLE: lease_id,
        **_limits(devices, real),
    }


def memory_limit_mib(devices: Iterable[DeviceView]) -> int | None:
    """Return the memory that the work may use on each of these devices; None = all of it."""
    return min((limit for device in devices if (limit := device.memory_limit_mib) is not None), default=None)


def _limits(devices: tuple[DeviceView, ...], real: list[DeviceView]) -> dict[str, str]:
    limit = memory_limit_mib(devices)
    if limit is None:
        return {}
    limits = {LIMIT_VARIABLE: str(limit)}
    if real and _mps_runs():
        # By the order in which the process sees its devices.
        memory = (f"{number}={device.memory_limit_mib or limit}M" for number, device in enumerate(real))
        limits["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(memory)
        limits["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(max(1, min(d.milli for d in real) // 10))
    return limits


def _mps_runs() -> bool:
    """Tell whether NVIDIA's MPS daemon serves this machine, by its control pipe."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_FOLDER, "control").exists()
