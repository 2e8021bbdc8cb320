"""Tell why an admitted claim does not start now: count its devices by state, name the true first blocker.

The blocker is the least that would have to change: what is free but held or excluded; what only people can
bring back; reservations; load; CPU and memory of the nodes; leases. The sentence is built in `reasons`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from airflow_gpu_provider.broker import reasons
from airflow_gpu_provider.broker.capacity import Capacity
from airflow_gpu_provider.broker.layout import BoolArray, Layout
from airflow_gpu_provider.broker.model import GpuRequest, Reason, ReasonCode

#: Classes of claims of which it is kept whether they start by waiting.
_CLASSES = 10_000


class Outlook:
    """What the end of leases would free: the fleet without any, as it is offered now."""

    def __init__(self, layout: Layout, *, max_load: float) -> None:
        self.max_load = max_load
        self.idle = Capacity.idle(layout, max_load=max_load)
        self.at_ease = Capacity(layout, layout.offered)
        self._cached: dict[Hashable, bool] = {}

    def starts_by_waiting(self, key: Hashable, request: GpuRequest, groups: Sequence[BoolArray]) -> bool:
        """Return whether the end of leases (and of load) is enough for a claim of this class to start."""
        known = self._cached.get(key)
        if known is None:
            if len(self._cached) >= _CLASSES:
                del self._cached[next(iter(self._cached))]
            known = self._cached[key] = self.at_ease.fits_one_of(request, groups)
        return known


@dataclass(frozen=True, slots=True, eq=False)
class Suitable:
    """The devices of a claim, in groups of which one must serve it whole (`placement.Placer.groups`)."""

    all: Sequence[BoolArray]  #: that suit its request
    some_day: Sequence[BoolArray]  #: of those, what it may be given at once or when reservations are over
    allowed: Sequence[BoolArray]  #: of those, what it may be given now


def diagnose(
    request: GpuRequest,
    suitable: Suitable,
    *,
    visible: Capacity,
    unheld: Capacity,
    outlook: Outlook,
    rivals: str = "",
) -> Reason:
    """Return why the claim waits. ``visible`` is free for it, ``unheld`` is free without holds for others.

    ``rivals`` says for whom devices are reserved.
    """
    counts = _count(request, suitable, visible, unheld)
    allowed = suitable.allowed
    if unheld.fits_one_of(request, allowed):
        code = ReasonCode.BEHIND_HEAD
    elif unheld.fits_one_of(request, suitable.some_day):
        code = ReasonCode.RESERVED
    elif unheld.fits_one_of(request, suitable.all):
        code = ReasonCode.DEVICES_EXCLUDED
    elif not outlook.at_ease.fits_one_of(request, suitable.some_day):
        code = ReasonCode.DEVICES_UNAVAILABLE
    elif not outlook.at_ease.fits_one_of(request, allowed):
        code = ReasonCode.RESERVED
    elif not outlook.idle.fits_one_of(request, allowed):
        code = ReasonCode.NODES_BUSY
    elif max(int(unheld.free(request, each).sum()) for each in allowed) >= request.gpus:
        code = ReasonCode.HOST_FULL
    else:
        code = ReasonCode.DEVICES_LEASED
    return reasons.waits(code, request, counts, max_load=outlook.max_load, rivals=rivals)


def _count(request: GpuRequest, suitable: Suitable, visible: Capacity, unheld: Capacity) -> reasons.Counts:
    layout, groups = visible.layout, suitable.allowed
    allowed, some_day = _union(groups), _union(suitable.some_day)
    free = visible.free(request, allowed)
    held = unheld.free(request, allowed) & ~free
    unavailable = allowed & ~layout.offered
    busy = allowed & layout.offered & ~visible.open
    leased = allowed & ~free & ~held & ~unavailable & ~busy
    return reasons.Counts(
        free=int(free.sum()),
        leased=int(leased.sum()),
        held=int(held.sum()),
        busy=int(busy.sum()),
        unavailable=int(unavailable.sum()),
        excluded=int((_union(suitable.all) & ~some_day).sum()),
        reserved=int((some_day & ~allowed).sum()),
        alike=max(int((free & each).sum()) for each in groups) if len(groups) > 1 else None,
        why_unavailable=_why(layout, unavailable),
    )


def _union(groups: Sequence[BoolArray]) -> BoolArray:
    found: BoolArray = np.logical_or.reduce(groups)
    return found


def _why(layout: Layout, unavailable: BoolArray) -> Counter[str]:
    why: Counter[str] = Counter()
    for bank, slot in np.argwhere(unavailable):
        device = layout.device(int(bank), int(slot))
        why[device.unavailable or layout.nodes[layout.node_of[bank]].unavailable or ""] += 1
    return why
