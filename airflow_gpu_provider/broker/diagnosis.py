"""Tell why an admitted claim does not start now: count its devices by state, name the true first blocker.

The blocker is the least that would have to change: what is free but held or excluded; what only people can
bring back; load; CPU and memory of the nodes; leases. The sentence is built in `reasons`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from airflow_gpu_provider.broker import reasons
from airflow_gpu_provider.broker.capacity import Capacity
from airflow_gpu_provider.broker.layout import BoolArray, Layout
from airflow_gpu_provider.broker.model import GpuRequest, Reason, ReasonCode


class Outlook:
    """What the end of leases would free: the fleet without any, as it is offered now."""

    def __init__(self, layout: Layout, *, max_load: float) -> None:
        self.max_load = max_load
        self.idle = Capacity.idle(layout, max_load=max_load)
        self.at_ease = Capacity(layout, layout.offered)
        self._cached: dict[Hashable, bool] = {}

    def starts_by_waiting(self, key: Hashable, request: GpuRequest, devices: BoolArray) -> bool:
        """Return whether the end of leases (and of load) is enough for a claim of this class to start."""
        known = self._cached.get(key)
        if known is None:
            known = self._cached[key] = self.at_ease.fits(request, devices)
        return known


@dataclass(frozen=True, slots=True, eq=False)
class Suitable:
    """The devices of a claim: all that suit its request, and those of them it does not exclude."""

    all: BoolArray
    allowed: BoolArray


def diagnose(
    request: GpuRequest, suitable: Suitable, *, visible: Capacity, unheld: Capacity, outlook: Outlook
) -> Reason:
    """Return why the claim waits. ``visible`` is free for it, ``unheld`` is free without holds for others."""
    counts = _count(request, suitable, visible, unheld)
    allowed = suitable.allowed
    if unheld.fits(request, allowed):
        code = ReasonCode.BEHIND_HEAD
    elif unheld.fits(request, suitable.all):
        code = ReasonCode.DEVICES_EXCLUDED
    elif not outlook.at_ease.fits(request, allowed):
        code = ReasonCode.DEVICES_UNAVAILABLE
    elif not outlook.idle.fits(request, allowed):
        code = ReasonCode.NODES_BUSY
    elif counts.free + counts.held >= request.gpus:
        code = ReasonCode.HOST_FULL
    else:
        code = ReasonCode.DEVICES_LEASED
    return reasons.waits(code, request, counts, max_load=outlook.max_load)


def _count(request: GpuRequest, suitable: Suitable, visible: Capacity, unheld: Capacity) -> reasons.Counts:
    layout, allowed = visible.layout, suitable.allowed
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
        excluded=int((suitable.all & ~allowed).sum()),
        why_unavailable=_why(layout, unavailable),
    )


def _why(layout: Layout, unavailable: BoolArray) -> Counter[str]:
    why: Counter[str] = Counter()
    for bank, slot in np.argwhere(unavailable):
        device = layout.device(int(bank), int(slot))
        why[device.unavailable or layout.nodes[layout.node_of[bank]].unavailable or ""] += 1
    return why
