"""Judge whether the empty fleet can ever serve a request; what never fits is rejected at once, with numbers.

Drained, stale and suspect devices count: they may come back, so their claims wait. Devices that the claim
itself excludes do not, unless all depends on one that is out of service. The test is the one that placement
uses, on a fleet without leases: what is admitted here can be placed there. The next step is `intake`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from airflow_gpu_provider.broker import reasons
from airflow_gpu_provider.broker.capacity import Capacity
from airflow_gpu_provider.broker.layout import BoolArray, Layout
from airflow_gpu_provider.broker.matching import candidates
from airflow_gpu_provider.broker.model import (
    Claim,
    DeviceId,
    Fleet,
    GpuRequest,
    Reason,
    ReasonCode,
)
from airflow_gpu_provider.broker.node_labels import EVERY, taints_of

#: Verdicts that are kept.
_VERDICTS = 10_000


def reject_reason(
    request: GpuRequest, fleet: Fleet, excluded: frozenset[DeviceId] = frozenset()
) -> Reason | None:
    """Return why the whole fleet, empty, could never run this; None = it can."""
    return Admission(Layout.of(fleet)).reject_reason(request, excluded)


class Admission:
    """Judges requests against one fleet; remembers verdicts, since many claims ask for the same."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._empty = Capacity.empty(layout)
        self._verdicts: dict[tuple[GpuRequest, frozenset[DeviceId]], Reason | None] = {}

    def reject_reason(
        self, request: GpuRequest, excluded: frozenset[DeviceId] = frozenset()
    ) -> Reason | None:
        """Return why this fleet could never run the request; None = it can."""
        key = (replace(request, spares=0, max_runtime_s=None), excluded)
        if key not in self._verdicts:
            if len(self._verdicts) >= _VERDICTS:
                del self._verdicts[next(iter(self._verdicts))]
            self._verdicts[key] = self._judge(request, excluded)
        return self._verdicts[key]

    def judge(self, claim: Claim, layout: Layout) -> tuple[Claim, Reason | None]:
        """Return the claim as it is let in, or why this fleet could never run it; ``layout`` is as of now.

        A device on which an earlier try failed and that is out of service is no longer excluded when the
        claim could not run without it: it comes back when somebody has seen to it.
        """
        reason = self.reject_reason(claim.request, claim.excluded)
        if reason is None or reason.code is not ReasonCode.DEVICES_EXCLUDED:
            return claim, reason
        in_service = frozenset(name for name in claim.excluded if layout.is_offered(name))
        if self.reject_reason(claim.request, in_service) is not None:
            return claim, reason
        return replace(claim, excluded=in_service), None

    def _judge(self, request: GpuRequest, excluded: frozenset[DeviceId]) -> Reason | None:
        devices = candidates(self._layout, request, excluded).devices
        if self._layout.exists.any() and self._empty.fits(request, devices):
            return None
        return self._why_never(request, excluded)

    def _why_never(self, request: GpuRequest, excluded: frozenset[DeviceId]) -> Reason:
        """Return the first filter after which too few devices are left: the true blocker."""
        if not self._layout.exists.any():
            return reasons.no_devices(request)
        found = _Filters(self._layout, request)
        if request.host is not None and request.host not in self._layout.hosts:
            return reasons.unknown_host(request, self._layout.hosts)
        return (
            self._too_few(found)
            or self._too_weak(found)
            or self._other_nodes(found)
            or self._all_excluded(found, excluded)
            or self._nodes_too_small(found)
        )

    def _too_few(self, found: _Filters) -> Reason | None:
        request = found.request
        here, anywhere = found.count(of_model=True), found.count(of_model=True, on_host=False)
        if here < request.gpus and (slices := found.slices()):
            return reasons.no_gang_of_slices(request, here, slices)
        if here == 0 and request.models:
            return reasons.unknown_model(request, found.models(), anywhere)
        if anywhere < request.gpus:
            return reasons.exceeds_fleet(request, anywhere, found.largest_node())
        if here < request.gpus:
            return reasons.host_has_too_few(request, here, anywhere)
        return None

    def _too_weak(self, found: _Filters) -> Reason | None:
        request, of_model = found.request, found.devices(of_model=True)
        large = found.devices(of_model=True, of_memory=True)
        if large.sum() < request.gpus:
            sizes = np.array([kind.memory_mib for kind in self._layout.kinds])[self._layout.kind_of]
            largest = int(sizes[of_model.any(axis=1)].max())
            return reasons.exceeds_memory(request, int(large.sum()), int(of_model.sum()), largest)
        fast = found.devices(of_model=True, of_memory=True, of_speed=True)
        if fast.sum() < request.gpus:
            speeds = np.array([kind.tflops for kind in self._layout.kinds])[self._layout.kind_of]
            fastest = float(speeds[large.any(axis=1)].max())
            return reasons.exceeds_tflops(request, int(fast.sum()), int(large.sum()), fastest)
        return None

    def _other_nodes(self, found: _Filters) -> Reason | None:
        request = found.request
        strong = found.devices(of_model=True, of_memory=True, of_speed=True)
        left = candidates(self._layout, request).devices
        if left.sum() >= request.gpus:
            return None
        nodes = self._layout.node_of[(strong & ~left).any(axis=1)]
        taints = Counter(taint for node in nodes for taint in taints_of(self._layout.nodes[node]))
        return reasons.exceeds_labels(request, int(left.sum()), int(strong.sum()), taints)

    def _all_excluded(self, found: _Filters, excluded: frozenset[DeviceId]) -> Reason | None:
        suitable = candidates(self._layout, found.request).devices
        left = candidates(self._layout, found.request, excluded).devices
        if self._empty.fits(found.request, suitable):
            return reasons.all_excluded(found.request, int((suitable & ~left).sum()), int(left.sum()))
        return None

    def _nodes_too_small(self, found: _Filters) -> Reason:
        devices = candidates(self._layout, found.request).devices
        nodes = np.unique(self._layout.node_of[devices.any(axis=1)])
        return reasons.exceeds_nodes(
            found.request,
            int(self._empty.room(found.request, devices).sum()),
            float(self._layout.cpu[nodes].max()) / 1000,
            int(self._layout.memory[nodes].max()),
        )


@dataclass(frozen=True, slots=True)
class _Filters:
    """The filters of a request one after another, to count what each leaves; labels and taints come last."""

    layout: Layout
    request: GpuRequest

    def devices(
        self, *, of_model: bool = False, of_memory: bool = False, of_speed: bool = False, on_host: bool = True
    ) -> BoolArray:
        """Return the devices that pass the chosen filters."""
        request = self.request
        loose = replace(
            request,
            models=request.models if of_model else frozenset(),
            memory_mib=request.memory_mib if of_memory else 0,
            strict=request.strict and of_speed,
            host=request.host if on_host else None,
            node_labels=frozenset(),
            tolerates=frozenset({EVERY}),
        )
        return candidates(self.layout, loose).devices

    def count(self, *, of_model: bool, on_host: bool = True) -> int:
        """Return how many pass."""
        return int(self.devices(of_model=of_model, on_host=on_host).sum())

    def slices(self) -> int:
        """Return how many MIG slices would serve a request for one device."""
        one = replace(self, request=replace(self.request, gpus=1))
        return one.count(of_model=True) - self.count(of_model=True)

    def models(self) -> dict[str, int]:
        """Return the models on the request's host, or of the fleet, with their numbers."""
        per_bank = self.devices().sum(axis=1)
        counts: Counter[str] = Counter()
        for bank in np.flatnonzero(per_bank):
            counts[self.layout.kinds[self.layout.kind_of[bank]].model] += int(per_bank[bank])
        return dict(counts)

    def largest_node(self) -> int:
        """Return the most devices of the model that one node has."""
        return int(self.layout.per_node(self.devices(of_model=True).sum(axis=1)).max())
