"""What must hold after every cycle, whatever was asked; without the core's arrays, so that it can differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from datetime import datetime

from airflow_gpu_provider.broker.matching import accepts, match_degree
from airflow_gpu_provider.broker.model import (
    Claim,
    ClaimId,
    CyclePolicy,
    Decisions,
    Device,
    DeviceId,
    Fleet,
    GpuRequest,
    Lease,
    Node,
    Placement,
    Snapshot,
)


def check(snapshot: Snapshot, decisions: Decisions, now: datetime, policy: CyclePolicy) -> None:
    live = [lease for lease in snapshot.leases if lease.expires_at > now]
    assert set(decisions.expired) == {lease.id for lease in snapshot.leases if lease.expires_at <= now}
    claims = {claim.id: claim for claim in snapshot.claims}
    devices = {device.id: (device, node) for node in snapshot.fleet.nodes for device in node.devices}
    _each_claim_once(snapshot, decisions, live)
    for placement in decisions.placements:
        _a_whole_gang(placement, claims[placement.claim_id], devices, policy)
    _no_device_over_committed(live, decisions, claims, devices)
    _no_node_over_committed(live, decisions, claims, devices)


def _each_claim_once(snapshot: Snapshot, decisions: Decisions, live: Iterable[Lease]) -> None:
    served = {lease.claim_id for lease in live}
    told = Counter(each.claim_id for each in decisions.placements)
    told.update(each.claim_id for each in decisions.rejections)
    told.update(each.claim_id for each in decisions.waiting)
    assert told == Counter(claim.id for claim in snapshot.claims if claim.id not in served)
    assert [each.position for each in decisions.waiting] == list(range(1, len(decisions.waiting) + 1))


def _a_whole_gang(
    placement: Placement, claim: Claim, devices: dict[DeviceId, tuple[Device, Node]], policy: CyclePolicy
) -> None:
    request = claim.request
    given = placement.devices + placement.spares
    assert len(placement.devices) == request.gpus, "a gang has all its members or none"
    assert len(placement.spares) <= request.spares
    assert len(set(given)) == len(given)
    assert not claim.excluded & set(given)
    degrees = []
    for name in given:
        device, node = devices[name]
        assert device.unavailable is None and node.unavailable is None
        assert node.load is None or node.load < policy.max_load
        assert accepts(request, model=device.model, memory_mib=device.memory_mib, tflops=device.tflops)
        assert request.host in (None, node.host)
        assert not request.artifacts_required or request.artifacts <= node.artifacts
        degrees.append(match_degree(device.tflops, request.min_tflops))
    assert placement.match_degree == min(degrees[: request.gpus], default=1.0)


def _no_device_over_committed(
    live: Iterable[Lease],
    decisions: Decisions,
    claims: dict[ClaimId, Claim],
    devices: dict[DeviceId, tuple[Device, Node]],
) -> None:
    used: Counter[DeviceId] = Counter()
    for lease in live:
        used.update(dict(zip(lease.devices, lease.milli, strict=True)))
    touched: set[DeviceId] = set()
    for placement in decisions.placements:
        given, request = placement.devices + placement.spares, claims[placement.claim_id].request
        assert bool(placement.shares) == (request.milli < 1000)
        shares = placement.shares or (1000,) * len(given)
        for name, share in zip(given, shares, strict=True):
            of_memory = math.ceil(1000 * request.memory_mib / devices[name][0].memory_mib)
            assert share == max(request.milli, of_memory)
        used.update(dict(zip(given, shares, strict=True)))
        touched.update(given)
    assert all(used[name] <= 1000 for name in touched)


def _no_node_over_committed(
    live: Iterable[Lease],
    decisions: Decisions,
    claims: dict[ClaimId, Claim],
    devices: dict[DeviceId, tuple[Device, Node]],
) -> None:
    holders = [(lease.request, lease.devices) for lease in live]
    new = [(claims[each.claim_id].request, each.devices + each.spares) for each in decisions.placements]
    cores: Counter[str] = Counter()
    memory: Counter[str] = Counter()
    for request, names in [*holders, *new]:
        on_node = Counter(devices[name][1].name for name in names if name in devices)
        for on, members in on_node.items():
            cores[on] += math.ceil(round(request.cpu_cores * 1000) * members / request.gpus)
            memory[on] += math.ceil(request.host_memory_mib * members / request.gpus)
    touched = {devices[name][1].name: devices[name][1] for _, names in new for name in names}
    for name, node in touched.items():
        # The share of each gang on a node is rounded up to a milli-core and a MiB.
        assert cores[name] <= round(node.cpu_cores * 1000) + len(new)
        assert memory[name] <= node.memory_mib + len(new)


def fits_empty(request: GpuRequest, fleet: Fleet, excluded: frozenset[DeviceId] = frozenset()) -> bool:
    """Return whether the fleet, empty and in order, has room for the whole gang: counted node by node."""
    members = 0
    for node in fleet.nodes:
        if request.host not in (None, node.host):
            continue
        able = sum(
            device.id not in excluded
            and accepts(request, model=device.model, memory_mib=device.memory_mib, tflops=device.tflops)
            for device in node.devices
        )
        while able and not _feeds(node, request, able):
            able -= 1
        members += able
    return members >= request.gpus


def _feeds(node: Node, request: GpuRequest, members: int) -> bool:
    return (
        request.cpu_cores * members / request.gpus <= node.cpu_cores
        and request.host_memory_mib * members / request.gpus <= node.memory_mib
    )
