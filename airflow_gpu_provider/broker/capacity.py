"""What is free on a fleet, as arrays that a cycle takes from.

Free is always computed from the live leases, never stored. Of a device it is a share in milli-GPU, of a
node the CPU and host memory that remain; a gang's CPU and memory are spread over its nodes by the devices
on each. Changed nodes are noted, so that whoever keeps something about them looks again only there. The next
step is `placement.Placer`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from airflow_gpu_provider.broker.layout import BoolArray, IntArray, Layout, millicores
from airflow_gpu_provider.broker.model import WHOLE_DEVICE, GpuRequest, Lease

#: A device by bank and slot.
Place: TypeAlias = tuple[int, int]


def share_of(total: int, members: int, gpus: int) -> int:
    """Return what ``members`` of a gang of ``gpus`` need of its CPU or host memory, rounded up."""
    return total if gpus == 0 else -(-total * members // gpus)


@dataclass(frozen=True, slots=True)
class Part:
    """An amount taken from a fleet: shares of devices, CPU and memory of nodes."""

    devices: tuple[tuple[int, int, int], ...]  #: bank, slot, milli
    nodes: tuple[tuple[int, int, int], ...]  #: node, milli-cores, MiB


def part_of(layout: Layout, request: GpuRequest, places: Sequence[Place], shares: Sequence[int] = ()) -> Part:
    """Return what a request takes when it has these devices, or ``shares`` of them."""
    on_node = Counter(int(layout.node_of[bank]) for bank, _ in places)
    cpu = millicores(request.cpu_cores)
    if not shares:
        by_memory = request.is_by_memory
        shares = (
            [layout.share_at(b, request) for b, _ in places] if by_memory else [request.milli] * len(places)
        )
    return Part(
        tuple((bank, slot, milli) for (bank, slot), milli in zip(places, shares, strict=True)),
        tuple(
            (
                node,
                share_of(cpu, members, request.gpus),
                share_of(request.host_memory_mib, members, request.gpus),
            )
            for node, members in on_node.items()
        ),
    )


def part_of_lease(layout: Layout, lease: Lease) -> Part:
    """Return what a lease holds of this fleet; devices that left the fleet hold nothing of it."""
    here = [number for number, device in enumerate(lease.devices) if device in layout.place_of]
    places = [layout.place_of[lease.devices[number]] for number in here]
    return part_of(layout, lease.request, places, [lease.shares[n] for n in here] if lease.shares else ())


def is_open(layout: Layout, max_load: float) -> BoolArray:
    """Return the devices that may be given out: neither unavailable nor on a node that is too busy."""
    # NaN (unknown load) compares false: what nobody measured is not a reason to refuse.
    busy = layout.load >= max_load
    found: BoolArray = layout.offered & ~busy[layout.node_of][:, None]
    return found


class Capacity:
    """Free devices, CPU and memory. Change it only by its methods: arrays, sums and notes belong together."""

    def __init__(self, layout: Layout, is_open: BoolArray) -> None:
        self.layout = layout
        #: [B, W] devices that may be given out at all; the others read as 0 free
        self.open = is_open
        self.milli: IntArray = np.where(is_open, WHOLE_DEVICE, 0).astype(np.int64)
        self.cpu: IntArray = layout.cpu.copy()
        self.memory: IntArray = layout.memory.copy()
        #: free milli-GPU by kind
        self.free_of_kind: list[int] = []
        #: nodes changed since the one who keeps an index of them looked
        self.changed: set[int] = set(range(len(layout.nodes)))
        self._sum_kinds()

    @classmethod
    def empty(cls, layout: Layout) -> Capacity:
        """Return the fleet without leases and with everything that is drained, stale or busy come back."""
        return cls(layout, layout.exists)

    @classmethod
    def idle(cls, layout: Layout, *, max_load: float) -> Capacity:
        """Return what may be given out now if no lease were live."""
        return cls(layout, is_open(layout, max_load))

    def copy(self) -> Capacity:
        """Return a capacity of its own with the same amounts. Of its nodes nobody keeps an index yet."""
        other = Capacity.__new__(Capacity)  # nothing is computed that is copied anyway: forecasts copy a lot
        other.layout, other.open, other.changed = self.layout, self.open, set()
        other.milli, other.cpu, other.memory = self.milli.copy(), self.cpu.copy(), self.memory.copy()
        other.free_of_kind = list(self.free_of_kind)
        return other

    def take(self, part: Part) -> None:
        """Take a part away."""
        self._add(part, -1)

    def give(self, part: Part) -> None:
        """Give a part back."""
        self._add(part, 1)

    def take_all(self, parts: Iterable[Part]) -> None:
        """Take many parts away at once; what leases hold of closed devices changes nothing."""
        many = list(parts)
        devices = np.array([row for part in many for row in part.devices], np.int64).reshape(-1, 3)
        nodes = np.array([row for part in many for row in part.nodes], np.int64).reshape(-1, 3)
        np.subtract.at(self.milli, (devices[:, 0], devices[:, 1]), devices[:, 2])
        np.subtract.at(self.cpu, nodes[:, 0], nodes[:, 1])
        np.subtract.at(self.memory, nodes[:, 0], nodes[:, 2])
        self.milli[~self.open] = 0
        self._sum_kinds()
        self.changed.update(range(len(self.layout.nodes)))

    def hide(self, part: Part) -> Part:
        """Take away as much of a part as is there; return what was taken, to `give` back later."""
        devices = (
            (bank, slot, min(milli, max(0, int(self.milli[bank, slot]))))
            for bank, slot, milli in part.devices
        )
        nodes = (
            (node, min(cpu, max(0, int(self.cpu[node]))), min(memory, max(0, int(self.memory[node]))))
            for node, cpu, memory in part.nodes
        )
        taken = Part(tuple(row for row in devices if row[2]), tuple(row for row in nodes if row[1] or row[2]))
        self.take(taken)
        return taken

    def free(self, request: GpuRequest, devices: BoolArray) -> BoolArray:
        """Return which of ``devices`` have the share that a member needs, whatever their node has left."""
        found: BoolArray = devices & self.open & (self.milli >= self.layout.shares_on_banks(request))
        return found

    def host_limit(self, request: GpuRequest) -> IntArray:
        """Return how many members the CPU and memory of each node can feed, at most the whole gang."""
        limit = np.full(len(self.layout.nodes), request.gpus, np.int64)
        needs = ((self.cpu, millicores(request.cpu_cores)), (self.memory, request.host_memory_mib))
        for left, need in needs:
            if need > 0:
                limit = np.minimum(limit, np.maximum(left, 0) * request.gpus // need)
        return limit

    def room(self, request: GpuRequest, devices: BoolArray) -> IntArray:
        """Return how many members of the gang each node can take now."""
        free = self.layout.per_node(self.free(request, devices).sum(axis=1))
        return np.minimum(free, self.host_limit(request))

    def fits(self, request: GpuRequest, devices: BoolArray) -> bool:
        """Return whether the whole gang fits."""
        return int(self.room(request, devices).sum()) >= request.gpus

    def fits_one_of(self, request: GpuRequest, groups: Iterable[BoolArray]) -> bool:
        """Return whether the whole gang fits on one of these groups of devices."""
        return any(self.fits(request, devices) for devices in groups)

    def reopen(self, layout: Layout, nodes: Sequence[int], held: Iterable[Part], *, max_load: float) -> None:
        """Follow what was closed or opened on ``nodes``; ``held`` is all that is taken on any of them."""
        self.layout = layout
        banks = np.concatenate(
            [np.arange(*layout.banks_of(node).indices(len(layout.banks))) for node in nodes]
        )
        self.open = self.open.copy()  # others may share it
        self.open[banks] = is_open(layout, max_load)[banks]
        self.milli[banks] = np.where(self.open[banks], WHOLE_DEVICE, 0)
        again = set(banks.tolist())
        for part in held:
            for bank, slot, milli in part.devices:
                if bank in again and self.open[bank, slot]:
                    self.milli[bank, slot] -= milli
        self._sum_kinds()
        self.changed.update(nodes)

    def validate(self, parts: Iterable[Part], *, max_load: float) -> None:
        """Raise `AssertionError` when this is not what these parts leave."""
        fresh = Capacity.idle(self.layout, max_load=max_load)
        fresh.take_all(parts)
        for name in ("open", "milli", "cpu", "memory"):
            if (getattr(fresh, name) != getattr(self, name)).any():
                raise AssertionError(f"{name} is not what the leases leave")
        if fresh.free_of_kind != self.free_of_kind:
            raise AssertionError("the sums by kind are not those of the devices")

    def _sum_kinds(self) -> None:
        layout = self.layout
        sums = np.bincount(layout.kind_of, self.milli.sum(axis=1), minlength=len(layout.kinds))
        self.free_of_kind = sums.astype(int).tolist()

    def _add(self, part: Part, sign: int) -> None:
        layout, changed = self.layout, self.changed
        for bank, slot, milli in part.devices:
            if self.open[bank, slot]:
                self.milli[bank, slot] += sign * milli
                self.free_of_kind[layout.kind_of[bank]] += sign * milli
            changed.add(int(layout.node_of[bank]))
        for node, cpu, memory in part.nodes:
            self.cpu[node] += sign * cpu
            self.memory[node] += sign * memory
            changed.add(node)
