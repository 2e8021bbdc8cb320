"""The environment of work on leased devices: which ones CUDA shows, and how much of a shared one is its own.

Devices are named by UUID, since NVML and CUDA number them differently; a simulated device hides every real
one. What keeps the work to its part is told by `training.isolation`. Used by `held_lease`.
"""

from __future__ import annotations

from collections.abc import Iterable

from airflow_gpu_provider.inventory.lease_mark import LEASE_VARIABLE
from airflow_gpu_provider.training.isolation import memory_limit_mib, share_limits, visible_devices
from airflow_gpu_provider.wire import DeviceView

__all__ = ["environment_of", "memory_limit_mib"]


def environment_of(lease_id: str, devices: Iterable[DeviceView]) -> dict[str, str]:
    """Return the variables for a process that works on these devices."""
    devices = tuple(devices)
    return {**visible_devices(devices), LEASE_VARIABLE: lease_id, **share_limits(devices)}
