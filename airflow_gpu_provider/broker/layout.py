"""The unchanging side of a fleet as arrays: which devices there are, where, of what flavor.

Devices of one flavor on one node form a *bank*, the row of every array; a node with two flavors has two banks
that share its CPU and memory. Order follows names, not arrival, so equal fleets give equal arrays. What is
free on them is the next step, `capacity.Capacity`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from airflow_gpu_provider.broker.domains import Domains
from airflow_gpu_provider.broker.flavors import canonical_model
from airflow_gpu_provider.broker.model import WHOLE_DEVICE, Device, DeviceId, Fleet, GpuRequest, Node
from airflow_gpu_provider.broker.node_labels import taints_of
from airflow_gpu_provider.broker.racks import Racks

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """What makes devices alike for placement."""

    model: str
    memory_mib: int
    tflops: float


def millicores(cores: float) -> int:
    """Return cores as whole thousandths: sums of floats would drift."""
    return round(cores * 1000)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Nodes (N), banks (B) of at most W devices, kinds (K). Build it with `Layout.of`."""

    nodes: tuple[Node, ...]
    kinds: tuple[Kind, ...]
    banks: tuple[tuple[Device, ...], ...]
    place_of: Mapping[DeviceId, tuple[int, int]]  #: bank and slot
    node_of: IntArray  #: [B]
    first_bank: tuple[int, ...]  #: [N + 1] the banks of a node lie side by side
    kind_of: IntArray  #: [B]
    exists: BoolArray  #: [B, W]
    offered: BoolArray  #: [B, W] neither the device nor its node is unavailable
    cpu: IntArray  #: [N] milli-cores
    memory: IntArray  #: [N] MiB
    load: FloatArray  #: [N] CPU load, NaN = unknown
    hosts: tuple[str, ...]
    host_of: IntArray  #: [N]
    is_one_kind_a_node: bool
    domains: Mapping[int, Domains]  #: by bank, where some of its devices are nearer to each other
    racks: Racks
    is_tainted: bool  #: whether any node keeps off those who do not tolerate it

    @classmethod
    def of(cls, fleet: Fleet) -> Layout:
        """Return the arrays of a fleet."""
        nodes = tuple(sorted(fleet.nodes, key=lambda node: node.name))
        rows = [
            (number, kind, devices) for number, node in enumerate(nodes) for kind, devices in _banks(node)
        ]
        kinds = tuple(sorted({kind for _, kind, _ in rows}))
        hosts = tuple(sorted({node.host for node in nodes}))
        banks = tuple(devices for _, _, devices in rows)
        width = max((len(devices) for devices in banks), default=1)
        exists = np.zeros((len(banks), width), np.bool_)
        offered = exists.copy()
        for bank, (number, _, devices) in enumerate(rows):
            exists[bank, : len(devices)] = True
            if nodes[number].unavailable is None:
                offered[bank, : len(devices)] = [device.unavailable is None for device in devices]
        node_of = np.array([number for number, _, _ in rows], np.int64)
        kind_number = {kind: number for number, kind in enumerate(kinds)}
        host_number = {host: number for number, host in enumerate(hosts)}
        return cls(
            nodes=nodes,
            kinds=kinds,
            banks=banks,
            place_of={d.id: (bank, slot) for bank, row in enumerate(banks) for slot, d in enumerate(row)},
            node_of=node_of,
            first_bank=tuple(np.searchsorted(node_of, np.arange(len(nodes) + 1)).tolist()),
            kind_of=np.array([kind_number[kind] for _, kind, _ in rows], np.int64),
            exists=exists,
            offered=offered,
            cpu=np.array([millicores(node.cpu_cores) for node in nodes], np.int64),
            memory=np.array([node.memory_mib for node in nodes], np.int64),
            load=np.array([math.nan if node.load is None else node.load for node in nodes], np.float64),
            hosts=hosts,
            host_of=np.array([host_number[node.host] for node in nodes], np.int64),
            is_one_kind_a_node=len(set(node_of.tolist())) == len(banks),
            domains={bank: found for bank, row in enumerate(banks) if (found := Domains.of(row)) is not None},
            racks=Racks.of(nodes),
            is_tainted=any(map(taints_of, nodes)),
        )

    @property
    def width(self) -> int:
        """The size of the largest bank."""
        return int(self.exists.shape[1])

    def renewed(self, nodes: Mapping[int, Node]) -> Layout:
        """Return the layout with these nodes by number, which differ only in what `fleet_changes` allows."""
        every, banks = list(self.nodes), list(self.banks)
        offered, load = self.offered.copy(), self.load.copy()
        for number, node in nodes.items():
            every[number] = node
            load[number] = math.nan if node.load is None else node.load
            now = {device.id: device for device in node.devices}
            for bank in range(self.first_bank[number], self.first_bank[number + 1]):
                banks[bank] = tuple(now[device.id] for device in banks[bank])
                offered[bank, : len(banks[bank])] = [
                    node.unavailable is None and device.unavailable is None for device in banks[bank]
                ]
        return replace(self, nodes=tuple(every), banks=tuple(banks), offered=offered, load=load)

    def device(self, bank: int, slot: int) -> Device:
        """Return the device at a place."""
        return self.banks[bank][slot]

    def shares(self, request: GpuRequest) -> IntArray:
        """Return what a member takes of a device of each kind [K], in milli-GPU."""
        return np.array([request.milli_on(kind.memory_mib) for kind in self.kinds], np.int64)

    def shares_on_banks(self, request: GpuRequest) -> int | IntArray:
        """Return what a member takes of a device of each bank [B, 1]; one number where it is the same."""
        return self.shares(request)[self.kind_of][:, None] if request.is_by_memory else request.milli

    def share_at(self, bank: int, request: GpuRequest) -> int:
        """Return what a member takes of a device of one bank."""
        if not request.is_by_memory:
            return request.milli
        return request.milli_on(self.kinds[self.kind_of[bank]].memory_mib)

    def is_offered(self, name: DeviceId) -> bool:
        """Return whether the fleet has the device and it is in service."""
        place = self.place_of.get(name)
        return place is not None and bool(self.offered[place])

    def banks_of(self, node: int) -> slice:
        """Return the banks of a node."""
        return slice(self.first_bank[node], self.first_bank[node + 1])

    def per_node(self, per_bank: IntArray) -> IntArray:
        """Return the sums over the banks of each node."""
        return np.bincount(self.node_of, per_bank, minlength=len(self.nodes)).astype(np.int64)

    def per_host(self, per_node: IntArray) -> IntArray:
        """Return the sums over the nodes of each host."""
        return np.bincount(self.host_of, per_node, minlength=len(self.hosts)).astype(np.int64)


def usual_share(kinds: Iterable[Kind], request: GpuRequest) -> int:
    """Return what a member takes of a device while nobody knows of which: the mean over the large ones.

    A whole number, since the order of a sum of parts would decide placements.
    """
    if not request.is_by_memory:
        return request.milli
    sizes = [kind.memory_mib for kind in kinds if kind.memory_mib >= request.memory_mib]
    return round(sum(map(request.milli_on, sizes)) / len(sizes)) if sizes else WHOLE_DEVICE


def _banks(node: Node) -> list[tuple[Kind, tuple[Device, ...]]]:
    by_kind: dict[Kind, list[Device]] = {}
    for device in node.devices:
        kind = Kind(canonical_model(device.model), device.memory_mib, device.tflops)
        by_kind.setdefault(kind, []).append(device)
    return [(kind, tuple(by_kind[kind])) for kind in sorted(by_kind)]
