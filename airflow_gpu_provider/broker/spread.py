"""A gang over several nodes, when no bank has room for all of it: all of its devices or none.

The nodes of one host before those of several, alike devices before mixed ones, the least wanted kind first,
few nodes, of one rack or zone if as few do (`racks`), and the tightest one for the rest; of equal devices of
a node those that are near one another (`domains`). `Spread` looks at every node: it is the exception,
`placement` calls it only when no single bank will do.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from airflow_gpu_provider.broker.capacity import Capacity, Place
from airflow_gpu_provider.broker.layout import BoolArray, FloatArray, IntArray
from airflow_gpu_provider.broker.model import GpuRequest
from airflow_gpu_provider.broker.racks import Chosen


def slots_of(
    capacity: Capacity, bank: int, request: GpuRequest, devices: BoolArray, number: int
) -> list[Place]:
    """Return the devices of a bank for ``number`` members, those with the least free share first.

    Which of equally free ones depends on what lies near what; how much of each share is taken does not.
    """
    milli = capacity.milli[bank]
    share = capacity.layout.share_at(bank, request)
    free = np.flatnonzero(devices[bank] & capacity.open[bank] & (milli >= share))
    tight = free[np.argsort(milli[free], kind="stable")]
    slots: list[int] = tight[:number].tolist()
    domains = capacity.layout.domains.get(bank)
    if domains is not None and 0 < number < len(tight):
        level = milli[slots[-1]]
        beside = [slot for slot in slots if milli[slot] < level]
        equal = tight[milli[tight] == level].tolist()
        slots = beside + domains.nearest(equal, number - len(beside), beside)
    return [(bank, slot) for slot in slots]


def slot_of_share(capacity: Capacity, bank: int, devices: BoolArray, share: int) -> Place:
    """Return a device of a bank with exactly this share free, the one in the most broken domain."""
    slots = np.flatnonzero(devices[bank] & capacity.open[bank] & (capacity.milli[bank] == share)).tolist()
    domains = capacity.layout.domains.get(bank)
    return bank, int(slots[0] if domains is None else domains.nearest(slots, 1)[0])


class Spread:
    """The choice for one request on one capacity; ``by_kind`` is what it costs on each kind."""

    def __init__(self, capacity: Capacity, request: GpuRequest, by_kind: FloatArray) -> None:
        self._capacity = capacity
        self._request = request
        self._by_kind = by_kind

    def places(self, devices: BoolArray) -> list[Place]:
        """Return a place for each member on ``devices``, or none at all."""
        request, capacity, layout = self._request, self._capacity, self._capacity.layout
        if not capacity.fits(request, devices):
            return []
        for some in self._uniform_first(devices):
            room = capacity.room(request, some)
            per_host = layout.per_host(room)
            if per_host.sum() < request.gpus:
                continue
            enough = np.flatnonzero(per_host >= request.gpus)
            if len(enough):
                host = enough[np.argmin(per_host[enough])]
                room = np.where(layout.host_of == host, room, 0)
            else:
                room = layout.racks.together(room, request.gpus)
            return self._fill(some, room)
        return []

    def _uniform_first(self, devices: BoolArray) -> Iterator[BoolArray]:
        """Yield the devices of each kind alone, the least wanted kind first, then all together."""
        kind_of = self._capacity.layout.kind_of
        kinds = np.unique(kind_of[devices.any(axis=1)])
        for kind in kinds[np.argsort(self._by_kind[kinds], kind="stable")]:
            yield devices & (kind_of == kind)[:, None]
        if len(kinds) > 1:
            yield devices

    def _fill(self, devices: BoolArray, room: IntArray) -> list[Place]:
        request, layout = self._request, self._capacity.layout
        room = room.copy()
        places: list[Place] = []
        chosen = Chosen(layout.nodes, layout.racks)
        while (left := request.gpus - len(places)) > 0:
            enough = room[room >= left]
            best = enough.min() if len(enough) else room.max()
            node = chosen.next_of(np.flatnonzero(room == best), room)
            number, taken = min(left, int(room[node])), len(places)
            for bank in range(layout.banks_of(node).start, layout.banks_of(node).stop):
                more = taken + number - len(places)
                places += slots_of(self._capacity, bank, request, devices, more)
            chosen.numbers.append(node)
            room[node] = 0
        return places
