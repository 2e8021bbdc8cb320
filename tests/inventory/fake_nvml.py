"""A driver that is not there: the functions of pynvml that the probe calls, over boards given as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml

MIB = 2**20


@dataclass
class Part:
    """What one handle answers; a function named in ``refuses`` raises that NVML error."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-80GB"
    total_mib: int = 81920
    used_mib: int = 1024
    busy: int = 37
    pids: tuple[int, ...] = ()
    mps_pids: tuple[int, ...] = ()
    temperature: int = 41
    power_mw: int = 61_500
    ecc: int = 0
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    slices: list[Part] | None = None
    slice_count: int = 1
    bus: int = 0
    links: list[int | None] = field(default_factory=list)  #: the bus at the other end; None = down
    numa: int | None = None  #: mask of NUMA nodes
    refuses: dict[str, int] = field(default_factory=dict)


def slice_of(uuid: str, *, count: int, total_mib: int, name: str | None = None) -> Part:
    unsupported = dict.fromkeys(
        ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetMigMode"), 3
    )
    name = name or f"NVIDIA A100-SXM4-80GB MIG {count}g.{round(total_mib / 1024)}gb"
    return Part(uuid, name, total_mib=total_mib, slice_count=count, refuses=unsupported)


class FakeNvml(ModuleType):
    """Stands in for the module pynvml."""

    def __init__(self, *boards: Part) -> None:
        super().__init__("pynvml")
        self.boards = list(boards)
        self.init_error: int | None = None
        self.inits = 0
        self.shutdowns = 0
        self.link_looks = 0
        self.lost: set[int] = set()
        self.events: list[tuple[Part, int]] = []

    def __getattr__(self, name: str) -> Any:
        # constants and error classes are the real ones; no call may reach a real driver
        if name.startswith(("NVML", "nvmlEventType", "nvmlMemory_v2")):
            return getattr(pynvml, name)
        if name.startswith("nvml"):
            raise AssertionError(f"the fake has no {name}")
        raise AttributeError(name)

    def _refuse(self, part: Part, function: str) -> None:
        if function in part.refuses:
            raise pynvml.NVMLError(part.refuses[function])

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self.shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Part:
        if index in self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.boards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Part:
        for board in self.boards:
            for part in (board, *(board.slices or ())):
                if part.uuid == uuid:
                    self._refuse(part, "nvmlDeviceGetHandleByUUID")
                    return part
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, part: Part) -> str:
        return part.uuid

    def nvmlDeviceGetName(self, part: Part) -> str:
        return part.name

    def nvmlDeviceGetPciInfo(self, part: Part) -> Any:
        self._refuse(part, "nvmlDeviceGetPciInfo")
        return SimpleNamespace(domain=0, bus=part.bus, device=0)

    def nvmlDeviceGetNvLinkState(self, part: Part, link: int) -> int:
        self.link_looks += 1
        self._refuse(part, "nvmlDeviceGetNvLinkState")
        if link >= len(part.links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(part.links[link] is not None)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, part: Part, link: int) -> Any:
        assert part.links[link] is not None, "asked of a link that is down"
        return SimpleNamespace(domain=0, bus=part.links[link], device=0)

    def nvmlDeviceGetMemoryAffinity(self, part: Part, words: int, scope: int) -> list[int]:
        if part.numa is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        assert scope == pynvml.NVML_AFFINITY_SCOPE_NODE
        return [part.numa] + [0] * (words - 1)

    def nvmlDeviceGetMigMode(self, part: Part) -> list[int]:
        self._refuse(part, "nvmlDeviceGetMigMode")
        return [int(part.slices is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, part: Part) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, part: Part, index: int) -> Part:
        assert part.slices is not None
        if index >= len(part.slices):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return part.slices[index]

    def nvmlDeviceGetAttributes(self, part: Part) -> Any:
        self._refuse(part, "nvmlDeviceGetAttributes")
        return SimpleNamespace(gpuInstanceSliceCount=part.slice_count, memorySizeMB=part.total_mib)

    def nvmlDeviceGetMemoryInfo(self, part: Part, version: int | None = None) -> Any:
        self._refuse(part, "nvmlDeviceGetMemoryInfo")
        # the first version counts what the driver reserves as used
        used = part.used_mib if version else part.used_mib + 500
        return SimpleNamespace(total=part.total_mib * MIB, used=used * MIB)

    def nvmlDeviceGetUtilizationRates(self, part: Part) -> Any:
        self._refuse(part, "nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=part.busy, memory=0)

    def nvmlDeviceGetTemperature(self, part: Part, sensor: int) -> int:
        self._refuse(part, "nvmlDeviceGetTemperature")
        return part.temperature

    def nvmlDeviceGetPowerUsage(self, part: Part) -> int:
        self._refuse(part, "nvmlDeviceGetPowerUsage")
        return part.power_mw

    def nvmlDeviceGetTotalEccErrors(self, part: Part, kind: int, counter: int) -> int:
        self._refuse(part, "nvmlDeviceGetTotalEccErrors")
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return part.ecc

    def nvmlDeviceGetRemappedRows(self, part: Part) -> tuple[int, int, int, int]:
        self._refuse(part, "nvmlDeviceGetRemappedRows")
        return part.rows

    def nvmlDeviceGetComputeRunningProcesses(self, part: Part) -> list[Any]:
        self._refuse(part, "nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=MIB) for pid in part.pids]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, part: Part) -> list[Any]:
        self._refuse(part, "nvmlDeviceGetMPSComputeRunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=MIB) for pid in part.mps_pids]

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, part: Part, kinds: int, events: object) -> None:
        self._refuse(part, "nvmlDeviceRegisterEvents")

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "a read must never wait for an event"
        if not self.events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        part, xid = self.events.pop(0)
        return SimpleNamespace(device=part, eventData=xid)
