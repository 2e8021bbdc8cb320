"""The most that a member of a request may take of a device, before it is known which one it gets.

A share by memory is a larger part of a smaller device. Teams are counted by the largest part, so that whoever
passes a limit here never exceeds it by the device that is chosen. The next step is `fair_share.FairShare`.
"""

from __future__ import annotations

from collections import defaultdict

from airflow_gpu_provider.broker.matching import accepts
from airflow_gpu_provider.broker.model import Fleet, GpuRequest

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
        self._cached: dict[GpuRequest, int] = {}

    def milli(self, request: GpuRequest) -> int:
        """Return what a member takes at most of a device that suits, in milli-GPU."""
        if not request.is_by_memory:
            return request.milli
        found = self._cached.get(request)
        if found is None:
            if len(self._cached) >= _REQUESTS:
                self._cached.clear()
            found = self._cached[request] = max(
                (
                    request.milli_on(memory_mib)
                    for model, memory_mib, tflops in self._kinds.get(request.host, ())
                    if accepts(request, model=model, memory_mib=memory_mib, tflops=tflops)
                ),
                default=request.milli,
            )
        return found
