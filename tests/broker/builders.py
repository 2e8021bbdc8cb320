"""Small fleets, claims and leases, so that a test states only what matters to it.

Devices are named ``node/index`` and nodes ``n0``, ``n1``..., each on a host of its own name; a claim is
submitted at `NOW` unless it has waited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

from hypothesis import HealthCheck, Phase, settings

from airflow_gpu_provider.broker.flavors import FLAVORS, tflops
from airflow_gpu_provider.broker.model import (
    Claim,
    ClaimId,
    Decisions,
    Device,
    DeviceId,
    Fleet,
    GpuRequest,
    Lease,
    LeaseId,
    Node,
    NodeName,
    Snapshot,
    Waiting,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
TTL = timedelta(seconds=30)

#: for state machines
STEPWISE = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink a failure takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def device(node: str, index: int, model: str = "A100", **more: Any) -> Device:
    known = FLAVORS.get(model)
    memory = more.pop("memory_mib", 16_384 if known is None else known.memory_mib)
    speed = more.pop("tflops", tflops(model))
    return Device(DeviceId(f"{node}/{index}"), NodeName(node), model, memory, speed, **more)


def node(
    name: str,
    gpus: int = 4,
    model: str = "A100",
    *,
    models: Sequence[str] | None = None,
    host: str | None = None,
    cpu_cores: float = 64,
    memory_mib: int = 512 * 1024,
    bad: Mapping[int, str] | None = None,
    nvlink: str = "",
    numa: Sequence[int | None] = (),
    **more: Any,
) -> Node:
    """``models`` names the model of each device; ``bad`` says which indices are unavailable, and why.

    ``nvlink`` and ``numa`` say where the first devices lie, such as "aabb" and (0, 0, 1, 1); "-" = unknown.
    """
    names = list(models) if models is not None else [model] * gpus
    devices = tuple(
        device(
            name,
            index,
            each,
            unavailable=(bad or {}).get(index),
            nvlink=None if index >= len(nvlink) or nvlink[index] == "-" else nvlink[index],
            numa=numa[index] if index < len(numa) else None,
        )
        for index, each in enumerate(names)
    )
    return Node(NodeName(name), host or name, cpu_cores, memory_mib, devices, **more)


def fleet(nodes: int = 2, gpus: int = 4, model: str = "A100", **more: Any) -> Fleet:
    return Fleet(tuple(node(f"n{index}", gpus, model, **more) for index in range(nodes)))


def fleet_of(*nodes: Node) -> Fleet:
    return Fleet(nodes)


def request(gpus: int = 1, model: str | None = None, **more: Any) -> GpuRequest:
    models = frozenset(model.split("|")) if model else frozenset()
    return GpuRequest(gpus=gpus, models=models, **more)


def claim(
    name: str,
    gpus: int = 1,
    model: str | None = None,
    *,
    waited_min: float = 0,
    excluded: Iterable[str] = (),
    **more: Any,
) -> Claim:
    """Fields of a claim or of its request by name."""
    own = {key: more.pop(key) for key in ("value", "run_type") if key in more}
    return Claim(
        id=ClaimId(name),
        request=request(gpus, model, **more),
        submitted_at=NOW - timedelta(minutes=waited_min),
        excluded=frozenset(DeviceId(each) for each in excluded),
        **own,
    )


def lease(
    name: str, devices: str, *, held_s: float = 0, expires_in_s: float = 30, **of_request: Any
) -> Lease:
    """``devices`` is "n0/0 n0/1"; the request has as many members unless ``gpus`` says otherwise."""
    ids = tuple(DeviceId(each) for each in devices.split())
    return Lease(
        id=LeaseId(f"lease-{name}"),
        claim_id=ClaimId(name),
        devices=ids,
        request=request(of_request.pop("gpus", len(ids)), **of_request),
        granted_at=NOW - timedelta(seconds=held_s),
        expires_at=NOW + timedelta(seconds=expires_in_s),
    )


def singles(devices: int, *, on: str = "n0", first: int = 0, **of_request: Any) -> list[Lease]:
    """One lease for each of the first devices of a node."""
    numbers = range(first, first + devices)
    return [lease(f"busy-{on}-{number}", f"{on}/{number}", **of_request) for number in numbers]


def snapshot(some_fleet: Fleet, claims: Iterable[Claim] = (), leases: Iterable[Lease] = ()) -> Snapshot:
    return Snapshot(some_fleet, tuple(leases), tuple(claims))


def after(before: Snapshot, decisions: Decisions, now: datetime, *, ttl: timedelta = TTL) -> Snapshot:
    """Return what the store would hold after writing these decisions; ``ttl`` for the new leases."""
    claims = {each.id: each for each in before.claims}
    gone = set(decisions.expired)
    granted = [
        Lease(
            id=LeaseId(f"lease-{placement.claim_id}"),
            claim_id=placement.claim_id,
            devices=placement.devices + placement.spares,
            request=claims[placement.claim_id].request,
            granted_at=now,
            expires_at=now + ttl,
            shares=placement.shares,
        )
        for placement in decisions.placements
    ]
    settled = {p.claim_id for p in decisions.placements} | {r.claim_id for r in decisions.rejections}
    return replace(
        before,
        leases=tuple(each for each in before.leases if each.id not in gone) + tuple(granted),
        claims=tuple(each for each in before.claims if each.id not in settled),
    )


def release(before: Snapshot, *claim_ids: str) -> Snapshot:
    """Return the snapshot after these claims' leases ended."""
    return replace(before, leases=tuple(each for each in before.leases if each.claim_id not in claim_ids))


def placed(decisions: Decisions) -> dict[str, list[str]]:
    """Return the devices by claim."""
    return {each.claim_id: [str(name) for name in each.devices] for each in decisions.placements}


def nodes_of(devices: list[str]) -> set[str]:
    return {name.split("/")[0] for name in devices}


def waiting(decisions: Decisions) -> dict[str, Waiting]:
    return {each.claim_id: each for each in decisions.waiting}


def rejected(decisions: Decisions) -> dict[str, str]:
    """Return the code by claim."""
    return {each.claim_id: each.reason.code.value for each in decisions.rejections}
