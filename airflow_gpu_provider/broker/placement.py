"""Choose devices for a request: best match first, then least cost, then least load within the cost band.

A gang gets all its devices or none: on one bank if any has room, else on the nodes of one host, else
anywhere. A worse match degree is looked at only when no better one can take the whole gang. Costs are kept
per request class and computed again only for banks that changed. The placer chooses;
`capacity.Capacity.take` makes it so.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace

import numpy as np

from airflow_gpu_provider.broker.capacity import Capacity, Place
from airflow_gpu_provider.broker.fragmentation import Mix
from airflow_gpu_provider.broker.layout import BoolArray, FloatArray, IntArray, millicores
from airflow_gpu_provider.broker.matching import Candidates, candidates
from airflow_gpu_provider.broker.model import WHOLE_DEVICE, DeviceId, GpuRequest

#: Weight of leaving little room on a bank: decides only between placements that else cost the same.
_PACKING = 100.0
#: Weight of speed beyond what was asked, for each milli-GPU: half of what as large a lack would cost.
_SURPLUS = 0.5


@dataclass(frozen=True, slots=True)
class Found:
    """Devices for a whole request; the degree is the weakest member's."""

    places: tuple[Place, ...]
    match_degree: float


@dataclass(slots=True)
class _Scores:
    """Costs of one request class: a whole gang on each bank, infinite where it does not fit."""

    request: GpuRequest
    suits: Candidates
    degrees: tuple[float, ...]
    mismatch: FloatArray  #: [B] cost of being slower or faster than asked
    cost: FloatArray  #: [B]
    slot: IntArray  #: [B] the device, where a share of one is asked
    seen: IntArray  #: [B] the bank's version that ``cost`` is true for


class Placer:
    """Chooses places on a capacity; keeps costs between calls, so that many requests of a class are cheap."""

    def __init__(self, capacity: Capacity, mix: Mix, *, cost_band: float) -> None:
        self._capacity = capacity
        self._mix = mix
        self._cost_band = cost_band
        self._scores: dict[tuple[GpuRequest, Set[DeviceId]], _Scores] = {}
        banks = len(capacity.layout.banks)
        self._fragments = np.zeros(banks)
        self._fragments_seen: IntArray = np.zeros(banks, np.int64)

    def place(self, request: GpuRequest, excluded: frozenset[DeviceId] = frozenset()) -> Found | None:
        """Return devices for all of the gang, or None; takes nothing."""
        scores = self._of_class(request, excluded)
        self._refresh(scores)
        for degree in scores.degrees:
            found = self._on_one_bank(scores, degree) or self._over_nodes(scores, degree)
            if found is not None:
                return found
        return None

    def suitable(self, request: GpuRequest, excluded: frozenset[DeviceId] = frozenset()) -> BoolArray:
        """Return the devices that suit a request, free or not."""
        return self._of_class(request, excluded).suits.devices

    def _of_class(self, request: GpuRequest, excluded: frozenset[DeviceId]) -> _Scores:
        key = (replace(request, spares=0, max_runtime_s=None), excluded)
        scores = self._scores.get(key)
        if scores is None:
            layout = self._capacity.layout
            suits = candidates(layout, request, excluded)
            banks = len(layout.banks)
            degrees = np.unique(suits.degree[suits.devices.any(axis=1)])[::-1]
            scores = _Scores(
                request=request,
                suits=suits,
                degrees=tuple(float(degree) for degree in degrees),
                mismatch=self._mismatch(request, suits),
                cost=np.full(banks, np.inf),
                slot=np.zeros(banks, np.int64),
                seen=np.zeros(banks, np.int64),
            )
            self._scores[key] = scores
        return scores

    def _mismatch(self, request: GpuRequest, suits: Candidates) -> FloatArray:
        asked = request.gpus * request.milli
        speeds = np.array([kind.tflops for kind in self._capacity.layout.kinds], np.float64)
        speed = speeds[self._capacity.layout.kind_of]
        surplus = np.zeros(len(speed))
        if request.min_tflops > 0:
            faster = np.maximum(speed - request.min_tflops, 0.0)
            surplus = np.divide(faster, speed, out=surplus, where=speed > 0)
        mismatch: FloatArray = asked * ((1.0 - suits.degree) + _SURPLUS * surplus)
        return mismatch

    # -- costs of the banks that changed
    def _refresh(self, scores: _Scores) -> None:
        capacity, request = self._capacity, scores.request
        changed = np.flatnonzero(scores.seen != capacity.version)
        if not len(changed):
            return
        scores.seen[changed] = capacity.version[changed]
        scores.cost[changed] = np.inf
        node = capacity.layout.node_of[changed]
        free = scores.suits.devices[changed] & capacity.open[changed]
        free &= capacity.milli[changed] >= request.milli
        fits = (free.sum(axis=1) >= request.gpus) & scores.suits.devices[changed].any(axis=1)
        fits &= capacity.cpu[node] >= millicores(request.cpu_cores)
        fits &= capacity.memory[node] >= request.host_memory_mib
        if not fits.any():
            return
        bank, free = changed[fits], free[fits]
        is_share = request.gpus == 1 and request.milli < WHOLE_DEVICE
        row, slot, after = (
            _each_share(capacity.milli[bank], free, request)
            if is_share
            else _tightest(capacity.milli[bank], free, request)
        )
        cost = self._cost(scores, bank[row], after)
        order = np.argsort(-cost, kind="stable")  # the best of a bank is written last
        scores.cost[bank[row[order]]] = cost[order]
        scores.slot[bank[row[order]]] = slot[order]

    def _cost(self, scores: _Scores, bank: IntArray, after: IntArray) -> FloatArray:
        capacity, mix, request = self._capacity, self._mix, scores.request
        layout = capacity.layout
        node, kind = layout.node_of[bank], layout.kind_of[bank]
        self._refresh_fragments(bank)
        asked = request.gpus * request.milli
        cpu, memory, milli = capacity.cpu[node], capacity.memory[node], capacity.milli[bank].sum(axis=1)
        cpu_after, milli_after = cpu - millicores(request.cpu_cores), milli - asked
        growth = mix.fragments(kind, cpu_after, after) - self._fragments[bank]
        growth += mix.stranded(cpu_after, memory - request.host_memory_mib, milli_after)
        growth -= mix.stranded(cpu, memory, milli)
        left = cpu_after / max(1, int(layout.cpu.max())) + milli_after / (layout.width * WHOLE_DEVICE)
        cost: FloatArray = growth + _PACKING * left
        return cost + mix.pressure[kind] * asked + scores.mismatch[bank]

    def _refresh_fragments(self, banks: IntArray) -> None:
        capacity = self._capacity
        changed = np.unique(banks[self._fragments_seen[banks] != capacity.version[banks]])
        if not len(changed):
            return
        cpu = capacity.cpu[capacity.layout.node_of[changed]]
        kind = capacity.layout.kind_of[changed]
        self._fragments[changed] = self._mix.fragments(kind, cpu, capacity.milli[changed])
        self._fragments_seen[changed] = capacity.version[changed]

    # -- choices
    def _on_one_bank(self, scores: _Scores, degree: float) -> Found | None:
        cost = np.where(scores.suits.degree == degree, scores.cost, np.inf)
        least = cost.min(initial=np.inf)
        if least == np.inf:
            return None
        near = np.flatnonzero(cost <= least + self._cost_band)
        bank = int(near[np.lexsort((cost[near], self._load(near)))[0]])
        request = scores.request
        if request.gpus == 1 and request.milli < WHOLE_DEVICE:
            return Found(((bank, int(scores.slot[bank])),), degree)
        return Found(tuple(self._slots(bank, request, scores.suits.devices, request.gpus)), degree)

    def _load(self, banks: IntArray) -> FloatArray:
        """Return the measured load of the banks' nodes; where nobody measures, the share given out."""
        layout = self._capacity.layout
        size = layout.exists[banks].sum(axis=1) * WHOLE_DEVICE
        given = 1.0 - self._capacity.milli[banks].sum(axis=1) / size
        measured = layout.load[layout.node_of[banks]]
        return np.where(np.isnan(measured), given, measured)

    def _slots(self, bank: int, request: GpuRequest, devices: BoolArray, number: int) -> list[Place]:
        milli = self._capacity.milli[bank]
        free = np.flatnonzero(devices[bank] & self._capacity.open[bank] & (milli >= request.milli))
        tight = free[np.argsort(milli[free], kind="stable")]
        return [(bank, int(slot)) for slot in tight[:number]]

    def _over_nodes(self, scores: _Scores, degree: float) -> Found | None:
        request, capacity, layout = scores.request, self._capacity, self._capacity.layout
        devices = scores.suits.of_degree(degree)
        if request.gpus < 2 or not capacity.fits(request, devices):
            return None
        for some in self._uniform_first(scores, devices):
            room = capacity.room(request, some)
            per_host = layout.per_host(room)
            if per_host.sum() < request.gpus:
                continue
            enough = np.flatnonzero(per_host >= request.gpus)
            if len(enough):
                host = enough[np.argmin(per_host[enough])]
                room = np.where(layout.host_of == host, room, 0)
            places = self._fill(request, some, room)
            return Found(tuple(places), min(float(scores.suits.degree[bank]) for bank, _ in places))
        return None

    def _uniform_first(self, scores: _Scores, devices: BoolArray) -> Iterator[BoolArray]:
        """Yield the devices of each kind alone, the least wanted kind first, then all together."""
        kind_of = self._capacity.layout.kind_of
        asked = scores.request.gpus * scores.request.milli
        price = scores.mismatch + self._mix.pressure[kind_of] * asked
        kinds, first = np.unique(kind_of[devices.any(axis=1)], return_index=True)
        price_of = price[np.flatnonzero(devices.any(axis=1))[first]]
        for kind in kinds[np.argsort(price_of, kind="stable")]:
            yield devices & (kind_of == kind)[:, None]
        if len(kinds) > 1:
            yield devices

    def _fill(self, request: GpuRequest, devices: BoolArray, room: IntArray) -> list[Place]:
        """Return a place for each member: few nodes, and the tightest one for the rest."""
        layout = self._capacity.layout
        room = room.copy()
        places: list[Place] = []
        while (left := request.gpus - len(places)) > 0:
            enough = np.flatnonzero(room >= left)
            node = int(enough[np.argmin(room[enough])]) if len(enough) else int(np.argmax(room))
            number, taken = min(left, int(room[node])), len(places)
            for bank in range(layout.banks_of(node).start, layout.banks_of(node).stop):
                places += self._slots(bank, request, devices, taken + number - len(places))
            room[node] = 0
        return places


def _each_share(milli: IntArray, free: BoolArray, request: GpuRequest) -> tuple[IntArray, IntArray, IntArray]:
    """Return (row, slot, milli after) for one device of each distinct free share of each bank."""
    first = free.copy()
    for slot in range(1, milli.shape[1]):
        first[:, slot] &= ((milli[:, :slot] != milli[:, slot : slot + 1]) | ~free[:, :slot]).all(axis=1)
    row, slot_of = np.nonzero(first)
    after = milli[row]
    after[np.arange(len(row)), slot_of] -= request.milli
    return row, slot_of, after


def _tightest(milli: IntArray, free: BoolArray, request: GpuRequest) -> tuple[IntArray, IntArray, IntArray]:
    """Return (row, slot, milli after) with the devices of the least free share taken on each bank."""
    order = np.argsort(np.where(free, milli, np.iinfo(np.int64).max), axis=1, kind="stable")
    after = milli.copy()
    taken = order[:, : request.gpus]
    np.put_along_axis(after, taken, np.take_along_axis(milli, taken, axis=1) - request.milli, axis=1)
    return np.arange(len(milli)), np.zeros(len(milli), np.int64), after
