"""Measure real NVIDIA devices through NVML.

A device is a *leaf*: a whole GPU, or each MIG slice of a GPU that is split, by its own UUID. NVML's index
exists only inside this file: its order differs from CUDA's. A field that a device does not support is
``None``, never 0. A device that was seen once stays in the report when the driver loses it, as suspect.
The next step is `agent.Agent`; `health` holds the rules for suspects.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from airflow_gpu_provider.broker.flavors import canonical_model, tflops
from airflow_gpu_provider.inventory import host
from airflow_gpu_provider.inventory.health import HealthSigns, suspect_reason
from airflow_gpu_provider.inventory.links import LinkMap
from airflow_gpu_provider.inventory.nvml_session import NvmlOff, NvmlSession
from airflow_gpu_provider.inventory.probe import NO_LEASES, Leases
from airflow_gpu_provider.inventory.xid_watch import XidWatch
from airflow_gpu_provider.reports import NVML_LABEL, DeviceReport, NodeReport

_MIB = 2**20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Gpu:
    """A board that answered."""

    handle: Any
    uuid: str
    name: str


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leasable part of a board: the board itself or a slice."""

    handle: Any
    uuid: str
    model: str
    share: float  #: of the board's compute, 0..1
    is_slice: bool


class NvmlProbe:
    """Reads all devices of this machine as one node."""

    def __init__(
        self, node: str | None = None, *, host_name: str | None = None, session: NvmlSession | None = None
    ) -> None:
        self._host = host_name or host.local_host()
        self._node = node or self._host
        self._session = session or NvmlSession()
        self._xids = XidWatch()
        self._links = LinkMap()
        self._parents: dict[str, str] = {}  # leaf uuid -> board uuid, for all leaves of the last read
        self._known: dict[str, DeviceReport] = {}

    @property
    def off(self) -> NvmlOff | None:
        """Why there is no measurement, or None."""
        return self._session.off

    def read(self, leases: Leases = NO_LEASES) -> tuple[NodeReport, ...]:
        """Measure now. Without NVML the node is reported without devices, and a label says why."""
        devices: tuple[DeviceReport, ...]
        off = self._session.ensure()
        if off is None:
            try:
                devices = self._read_devices()
            except self._session.library.NVMLError as error:
                off = self._session.drop(error)
        if off is not None:
            devices = tuple(_lost(known, off.sentence) for known in self._known.values())
        node = NodeReport(
            name=self._node,
            host=self._host,
            cpu_cores=host.cpu_cores(),
            memory_mib=host.memory_mib(),
            load=host.cpu_load(),
            labels={} if off is None else {NVML_LABEL: off.sentence},
            devices=devices,
        )
        return (node,)

    def close(self) -> None:
        """Stop NVML."""
        self._session.close()

    def _read_devices(self) -> tuple[DeviceReport, ...]:
        nvml = self._session.library
        count = nvml.nvmlDeviceGetCount()
        gpus = [gpu for gpu in map(self._open, range(count)) if gpu is not None]
        handles = {gpu.uuid: gpu.handle for gpu in gpus}
        xids = self._xids.read(nvml, self._session.starts, handles)
        self._links.read(nvml, handles)
        found: dict[str, DeviceReport] = {}
        parents: dict[str, str] = {}
        for gpu in gpus:
            signs = self._signs(gpu, xids.get(gpu.uuid, ()))
            for leaf in self._leaves(gpu):
                found[leaf.uuid] = self._measure(gpu, leaf, signs)
                parents[leaf.uuid] = gpu.uuid
        answered = {gpu.uuid for gpu in gpus}
        for uuid, known in self._known.items():
            # A slice that is gone while its board answers was removed by the administrator: forget it.
            parent = self._parents[uuid]
            if uuid not in found and parent not in answered:
                found[uuid], parents[uuid] = _lost(known, "GPU is lost"), parent
        self._known, self._parents = found, parents
        return tuple(found.values())

    def _open(self, index: int) -> _Gpu | None:
        """Open one board; None when the driver has lost it (its leaves are then reported as lost)."""
        nvml = self._session.library
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            return _Gpu(handle, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle))
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_UNINITIALIZED, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
                raise
            log.debug("NVML does not open a device: %s", error)
            return None

    def _leaves(self, gpu: _Gpu) -> Iterator[_Leaf]:
        nvml = self._session.library
        mode = self._ask("nvmlDeviceGetMigMode", gpu.handle)
        if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            yield _Leaf(gpu.handle, gpu.uuid, canonical_model(gpu.name), 1.0, is_slice=False)
            return
        slots = self._ask("nvmlDeviceGetMaxMigDeviceCount", gpu.handle) or 0
        for slot in range(slots):
            handle = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", gpu.handle, slot)
            uuid = None if handle is None else self._ask("nvmlDeviceGetUUID", handle)
            if uuid is not None:
                attributes = self._ask("nvmlDeviceGetAttributes", handle)
                share = 1 / slots if attributes is None else attributes.gpuInstanceSliceCount / slots
                yield _Leaf(handle, uuid, self._slice_model(gpu, handle, attributes), share, is_slice=True)

    def _slice_model(self, gpu: _Gpu, handle: Any, attributes: Any) -> str:
        """Return the name of a slice with its profile, as "A100-MIG-1g.10gb"."""
        name = self._ask("nvmlDeviceGetName", handle) or ""
        if " MIG " not in name and attributes is not None:
            gib = round(attributes.memorySizeMB / 1024)
            name = f"{gpu.name} MIG {attributes.gpuInstanceSliceCount}g.{gib}gb"
        return canonical_model(name if " MIG " in name else f"{gpu.name} MIG unknown")

    def _signs(self, gpu: _Gpu, xids: tuple[int, ...]) -> HealthSigns:
        nvml = self._session.library
        try:
            rows = self._ask("nvmlDeviceGetRemappedRows", gpu.handle)
            ecc = self._ask(
                "nvmlDeviceGetTotalEccErrors",
                gpu.handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            )
        except nvml.NVMLError as error:
            return HealthSigns(xids=xids, lost=str(error))
        return HealthSigns(ecc, None if rows is None else bool(rows[3]), xids)

    def _measure(self, gpu: _Gpu, leaf: _Leaf, signs: HealthSigns) -> DeviceReport:
        try:
            return self._measured(gpu, leaf, signs)
        except self._session.library.NVMLError as error:
            known = self._known.get(leaf.uuid) or DeviceReport(
                id=leaf.uuid,
                model=leaf.model,
                memory_mib=0,
                tflops=tflops(gpu.name) * leaf.share,
                share=leaf.share,
            )
            return _lost(known, str(error))

    def _measured(self, gpu: _Gpu, leaf: _Leaf, signs: HealthSigns) -> DeviceReport:
        nvml = self._session.library
        total, used = self._memory(leaf.handle)
        utilisation = self._ask("nvmlDeviceGetUtilizationRates", leaf.handle)
        # One sensor a board: its temperature is right for each slice. Its power is not: it would count twice.
        temperature = self._ask("nvmlDeviceGetTemperature", gpu.handle, nvml.NVML_TEMPERATURE_GPU)
        power_mw = None if leaf.is_slice else self._ask("nvmlDeviceGetPowerUsage", leaf.handle)
        # Programs that draw on a screen are no competitors; only those that compute count.
        processes = [
            *(self._ask("nvmlDeviceGetComputeRunningProcesses", leaf.handle) or ()),
            *(self._ask("nvmlDeviceGetMPSComputeRunningProcesses", leaf.handle) or ()),
        ]
        return DeviceReport(
            id=leaf.uuid,
            model=leaf.model,
            memory_mib=total,
            tflops=tflops(gpu.name) * leaf.share,
            share=leaf.share,
            utilisation=None if utilisation is None else utilisation.gpu / 100,
            memory_used_mib=used,
            temperature_c=temperature,
            power_w=None if power_mw is None else power_mw / 1000,
            ecc_uncorrected=signs.ecc_uncorrected,
            foreign_pids=tuple(sorted({process.pid for process in processes})),
            suspect=suspect_reason(signs),
            # slices do not talk over NVLink
            nvlink=None if leaf.is_slice else self._links.domain_of.get(gpu.uuid),
            numa=self._links.numa_of.get(gpu.uuid),
        )

    def _memory(self, handle: Any) -> tuple[int, int | None]:
        nvml = self._session.library
        # The second version keeps what the driver reserves for itself out of "used".
        info = self._ask("nvmlDeviceGetMemoryInfo", handle, getattr(nvml, "nvmlMemory_v2", None))
        info = info or self._ask("nvmlDeviceGetMemoryInfo", handle)
        if info is None:  # unified memory: the device has none of its own and uses the machine's
            return host.memory_mib(), None
        return info.total // _MIB, info.used // _MIB

    def _ask(self, function: str, *args: Any) -> Any:
        """Call NVML; None when this device or driver does not support it, an error when the GPU is gone."""
        nvml = self._session.library
        try:
            return getattr(nvml, function)(*args)
        except nvml.NVMLError as error:
            if error.value in (
                nvml.NVML_ERROR_GPU_IS_LOST,
                nvml.NVML_ERROR_RESET_REQUIRED,
                nvml.NVML_ERROR_UNINITIALIZED,
                nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            ):
                raise
            log.debug("%s: %s", function, error)
            return None


def _lost(known: DeviceReport, words: str) -> DeviceReport:
    """Return the last report of a device without its measurements, which are no longer true."""
    return DeviceReport(
        id=known.id,
        model=known.model,
        memory_mib=known.memory_mib,
        tflops=known.tflops,
        share=known.share,
        nvlink=known.nvlink,
        numa=known.numa,
        suspect=suspect_reason(HealthSigns(lost=words)),
    )
