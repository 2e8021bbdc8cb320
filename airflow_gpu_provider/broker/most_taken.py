"""The most that a member of a request may take of a device, before it is known which one it gets.

A share by memory is a larger part of a smaller device. Teams are counted by the largest part, so that whoever
passes a limit here never exceeds it by the device that is chosen. The next step is `fair_share.FairShare`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from airflow_gpu_provider.broker.matching import accepts
from airflow_gpu_provider.broker.model import Fleet, GpuRequest
from airflow_gpu_provider.broker.throughput import UNKNOWN, Speeds

#: Requests of which it is kept.
_REQUESTS = 10_000


class MostTaken:
    """The kinds of devices of a fleet, by host."""

    def __init__(self, fleet: Fleet) -> None:
        #: (model, memory, TFLOPS) of the devices by host; None = of the whole fleet
        self._kinds: defaultdict[str | None, set[tuple[str, int, float]]] = defaultdict(set)
        for node in fleet.nodes:
            kinds = {(device.model, device.memory_mib, device.tflops) for device in node.devices}
            self._kinds[node.host] |= kinds
            self._kinds[None] |= kinds
        self._speeds: Callable[[str | None], Speeds] = lambda _: UNKNOWN
        self._cached: dict[GpuRequest, int] = {}

    def learn(self, speeds: Callable[[str | None], Speeds]) -> None:
        """Take what was measured of each kind of work."""
        self._speeds = speeds
        self._cached.clear()

    def milli(self, request: GpuRequest) -> int:
        """Return what a member takes at most of a device that suits, in milli-GPU."""
        if not request.is_by_memory:
            return request.milli
        found = self._cached.get(request)
        if found is None:
            if len(self._cached) >= _REQUESTS:
                self._cached.clear()
            kinds = self._kinds.get(request.host, ())
            suiting = (kind[1] for kind in kinds if self._may_suit(request, *kind))
            found = self._cached[request] = max(map(request.milli_on, suiting), default=request.milli)
        return found

    def _may_suit(self, request: GpuRequest, model: str, memory_mib: int, tflops: float) -> bool:
        """Return whether a kind suits by its rating or by what was measured: strict claims go by either."""
        speeds = tflops, self._speeds(request.task_class).of(model, tflops)
        return any(accepts(request, model=model, memory_mib=memory_mib, tflops=each) for each in speeds)
