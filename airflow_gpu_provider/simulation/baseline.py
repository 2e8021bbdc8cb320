"""A simple scheduler: claims in a fixed order, each on free devices of the first kind that has enough.

What `policies` compares the broker with; how the order and the kinds are chosen makes the policy. Claims
that need the same wait in one line, so that a turn looks at the heads of lines and not at each claim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from heapq import heapify, heappop, heappush, nsmallest
from itertools import chain
from typing import TypeAlias

from airflow_gpu_provider.broker.layout import Kind
from airflow_gpu_provider.broker.matching import accepts
from airflow_gpu_provider.broker.model import Claim, ClaimId, DeviceId, Fleet, GpuRequest, Placement
from airflow_gpu_provider.broker.node_labels import serves, taints_of

Rank: TypeAlias = tuple[float, datetime, ClaimId]
#: Sorts the suitable kinds for a claim, given how many devices of each are free; may leave some out.
Preference: TypeAlias = Callable[[Claim, Sequence[Kind], Mapping[Kind, int]], list[Kind]]
_LineKey: TypeAlias = tuple[GpuRequest, str | None]


def by_arrival(claim: Claim) -> Rank:
    """Order by arrival."""
    return (0.0, claim.submitted_at, claim.id)


def by_value(claim: Claim) -> Rank:
    """Order by value, then arrival: Airflow's order within a pool."""
    return (-claim.value, claim.submitted_at, claim.id)


def suits(request: GpuRequest, kind: Kind) -> bool:
    """Return whether devices of a kind may serve a request."""
    return accepts(request, model=kind.model, memory_mib=kind.memory_mib, tflops=kind.tflops)


def kinds_of(fleet: Fleet, request: GpuRequest | None = None) -> dict[Kind, int]:
    """Return how many devices of each kind are offered, to a request on the nodes that serve it."""
    return {kind: len(devices) for kind, devices in _devices_by_kind(fleet, request).items()}


def _devices_by_kind(fleet: Fleet, request: GpuRequest | None = None) -> dict[Kind, list[DeviceId]]:
    found: dict[Kind, list[DeviceId]] = {}
    for node in fleet.nodes:
        if request is not None and not serves(node, request):
            continue
        for device in node.devices:
            if node.unavailable is None and device.unavailable is None:
                kind = Kind(device.model, device.memory_mib, device.tflops)
                found.setdefault(kind, []).append(device.id)
    return found


@dataclass(slots=True)
class _Line:
    """Claims that need the same, the next one first."""

    suitable: list[Kind]
    may: frozenset[DeviceId] | None  #: the devices of the nodes that serve it; None = all
    queue: list[tuple[Rank, Claim]] = field(default_factory=list)


class Baseline:
    """One queue; `is_passable` = a claim that does not fit lets others pass, else all behind it wait."""

    def __init__(
        self, fleet: Fleet, *, rank: Callable[[Claim], Rank], prefer: Preference, is_passable: bool
    ) -> None:
        self._rank = rank
        self._prefer = prefer
        self._is_passable = is_passable
        self._fleet = fleet
        self._is_tainted = any(taints_of(node) for node in fleet.nodes)
        by_kind = _devices_by_kind(fleet)
        self._kind_of = {device: kind for kind, devices in by_kind.items() for device in devices}
        #: the free devices, by id, so that it does not matter in which order they became free
        self._free = {kind: sorted(devices) for kind, devices in by_kind.items()}
        self._held: dict[ClaimId, tuple[DeviceId, ...]] = {}
        self._lines: dict[_LineKey, _Line] = {}
        self._gone: set[ClaimId] = set()

    def hold(self, claim: Claim, devices: tuple[DeviceId, ...], started: datetime) -> None:
        """Learn a claim that holds devices already; those that are no longer offered do not come back."""
        offered = tuple(device for device in devices if device in self._kind_of)
        for device in offered:
            self._free[self._kind_of[device]].remove(device)
        self._held[claim.id] = offered

    def submit(self, claim: Claim) -> None:
        """Queue a claim."""
        key = (replace(claim.request, spares=0, max_runtime_s=None), claim.dag_id)
        line = self._lines.get(key)
        if line is None:
            suitable = [kind for kind in self._free if suits(claim.request, kind)]
            line = self._lines[key] = _Line(suitable, self._served(claim.request))
        heappush(line.queue, (self._rank(claim), claim))

    def withdraw(self, claim_id: ClaimId) -> None:
        """Forget a claim that waits, when its line comes to it."""
        self._gone.add(claim_id)

    def end(self, claim_id: ClaimId, now: datetime, *, model: str, runtime_s: float) -> None:
        """Take the devices of a claim back."""
        for device in self._held.pop(claim_id):
            heappush(self._free[self._kind_of[device]], device)

    def turn(self, now: datetime) -> tuple[tuple[Placement, ...], tuple[ClaimId, ...]]:
        """Start what fits. Nothing is rejected: a pool never tells a task that it is too large."""
        placements: list[Placement] = []
        lines = list(self._lines.values())
        order = [(rank, number) for number, line in enumerate(lines) if (rank := self._head(line))]
        heapify(order)
        while order:
            _, number = heappop(order)
            line = lines[number]
            claim = line.queue[0][1]
            devices = self._take(claim, line)
            if devices is None:
                if not self._is_passable:
                    break
                continue
            heappop(line.queue)
            self._held[claim.id] = devices
            placements.append(Placement(claim.id, devices))
            following = self._head(line)
            if following is not None:
                heappush(order, (following, number))
        return tuple(placements), ()

    def _head(self, line: _Line) -> Rank | None:
        while line.queue and line.queue[0][1].id in self._gone:
            self._gone.discard(heappop(line.queue)[1].id)
        return line.queue[0][0] if line.queue else None

    def _served(self, request: GpuRequest) -> frozenset[DeviceId] | None:
        """Return the devices that labels and taints leave a request; None = all."""
        if not request.node_labels and not self._is_tainted:
            return None
        return frozenset(chain.from_iterable(_devices_by_kind(self._fleet, request).values()))

    def _take(self, claim: Claim, line: _Line) -> tuple[DeviceId, ...] | None:
        may = line.may
        free = {
            kind: len(self._free[kind]) if may is None else len(may.intersection(self._free[kind]))
            for kind in line.suitable
        }
        for kind in self._prefer(claim, line.suitable, free):
            if free[kind] >= claim.request.gpus:
                return self._first(kind, claim.request.gpus, may)
        return None

    def _first(self, kind: Kind, number: int, may: frozenset[DeviceId] | None) -> tuple[DeviceId, ...]:
        devices = self._free[kind]
        if may is None:
            return tuple(heappop(devices) for _ in range(number))
        taken = nsmallest(number, may.intersection(devices))
        self._free[kind] = sorted(set(devices).difference(taken))
        return tuple(taken)
