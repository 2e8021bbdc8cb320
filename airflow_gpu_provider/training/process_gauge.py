"""What one shard's process and device are doing, read once a second by its telemetry thread.

The device's own numbers come from NVML, by UUID and with the inventory's way to start it; without a driver
they are None, never 0. Reading them does not touch the CUDA context, so it never waits for the device's work.
Used by `telemetry`.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from airflow_gpu_provider.inventory.nvml_session import NvmlSession
from airflow_gpu_provider.training.process_state import read_process_state

log = logging.getLogger(__name__)

_MIB = 2**20


class ProcessGauge:
    """This process, and the device whose UUID it was given."""

    def __init__(self, device_id: str | None, session: NvmlSession | None = None) -> None:
        self._device_id = device_id
        self._session = session or NvmlSession()
        self._cpu = (time.monotonic(), 0.0)

    def read(self) -> dict[str, JsonValue]:
        """Return processors used since the last call, memory, and the device's load and memory."""
        return {**self._process(), **self._device()}

    def _process(self) -> dict[str, JsonValue]:
        state = read_process_state(os.getpid())
        now, (before, used_s) = time.monotonic(), self._cpu
        if state is None or now <= before:
            return {"cpu_cores": None, "memory_mib": None}
        self._cpu = (now, state.cpu_s)
        cores = round((state.cpu_s - used_s) / (now - before), 3) if used_s else None
        return {"cpu_cores": cores, "memory_mib": resident_mib()}

    def _device(self) -> dict[str, JsonValue]:
        if self._device_id is None:
            return {}
        unknown: dict[str, JsonValue] = {
            "gpu_pct": None,
            "gpu_memory_mib": None,
            "gpu_memory_total_mib": None,
        }
        if self._session.ensure() is not None:
            return unknown
        library = self._session.library
        try:
            handle = library.nvmlDeviceGetHandleByUUID(self._device_id)
            memory = _memory(library, handle)
        except library.NVMLError as error:
            log.debug("NVML does not tell of %s: %s", self._device_id, error)
            if error.value == library.NVML_ERROR_UNINITIALIZED:  # the driver was restarted
                self._session.drop(error)
            return unknown
        return {
            "gpu_pct": _utilisation(library, handle),
            "gpu_memory_mib": memory.used // _MIB,
            "gpu_memory_total_mib": memory.total // _MIB,
        }


def _memory(library: Any, handle: Any) -> Any:
    try:  # the second version keeps what the driver reserves for itself out of "used"
        return library.nvmlDeviceGetMemoryInfo(handle, library.nvmlMemory_v2)
    except (AttributeError, library.NVMLError_NotSupported, library.NVMLError_FunctionNotFound):
        return library.nvmlDeviceGetMemoryInfo(handle)


def _utilisation(library: Any, handle: Any) -> float | None:
    try:
        return float(library.nvmlDeviceGetUtilizationRates(handle).gpu)
    except library.NVMLError:  # a MIG slice has none of its own
        return None


def resident_mib() -> float | None:
    """Return the memory this process has in RAM."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return round(pages * os.sysconf("SC_PAGE_SIZE") / _MIB, 1)
