"""What is free for a lease that grows, on the arrays of a turn.

The capacity must be what a new claim would see at the end of the queue: without what leases and open offers
hold, and without what is kept for waiting claims, so that growing never delays who waits. `part_of_offer` is
what an open offer takes from it. The decisions are in `resize`.
"""

from __future__ import annotations

from collections.abc import Sequence

from airflow_gpu_provider.broker.capacity import Capacity, Part, part_of
from airflow_gpu_provider.broker.classes import ClassKey
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.model import DeviceId, GpuRequest
from airflow_gpu_provider.broker.move import Offer, held_by
from airflow_gpu_provider.broker.placement import Placer
from airflow_gpu_provider.broker.strictness import judged_by


class FreeRoom:
    """A `resize.Room` on a capacity and its placer."""

    def __init__(self, capacity: Capacity, placer: Placer, closed: frozenset[DeviceId] = frozenset()) -> None:
        self._capacity = capacity
        self._placer = placer
        self._closed = closed

    def free_milli(self, device: DeviceId) -> int:
        """Return the free share of a device; 0 for one that is not offered to this lease."""
        place = self._capacity.layout.place_of.get(device)
        if place is None or device in self._closed:
            return 0
        return max(0, int(self._capacity.milli[place]))

    def memory_mib(self, device: DeviceId) -> int:
        """Return the size of a device; 0 for one that left the fleet."""
        place = self._capacity.layout.place_of.get(device)
        return 0 if place is None else self._capacity.layout.device(*place).memory_mib

    def model(self, device: DeviceId) -> str | None:
        """Return the model of a device; None for one that left the fleet."""
        place = self._capacity.layout.place_of.get(device)
        return None if place is None else self._capacity.layout.device(*place).model

    def find(self, request: GpuRequest, excluded: frozenset[DeviceId]) -> Sequence[DeviceId] | None:
        """Return free devices for all of a request, or None."""
        asked = judged_by(ClassKey(request), self._placer).request
        found = self._placer.place(asked, excluded | self._closed)
        if found is None:
            return None
        return tuple(self._capacity.layout.device(bank, slot).id for bank, slot in found.places)


def part_of_offer(layout: Layout, offer: Offer) -> Part:
    """Return what an open offer takes beyond what its lease holds: with both, either place can be kept.

    Members that move need their cores and host memory in both places, since both are at work for a while.
    """
    devices = ((layout.place_of[name], milli) for name, milli in held_by(offer) if name in layout.place_of)
    arrivals = [layout.place_of[new] for _, new in offer.moves if new in layout.place_of]
    return Part(
        tuple((bank, slot, milli) for (bank, slot), milli in devices),
        part_of(layout, offer.request, arrivals).nodes,
    )
