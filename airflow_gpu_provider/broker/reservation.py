"""Devices that people reserved ahead: which ones are kept, and who may use them meanwhile.

A reservation is for a team or a DAG. It names devices, or a number of them of a model; then those that will
be free when it starts are chosen, again and again, so that a failed device is replaced by another. Its owner
may use them at any time, others only if they promise to end before it starts; without a promise they may
until `ReservationPolicy.notice`. Nothing is taken from a lease here: those that overstay are named, and
taking back is the next step, `preemption`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeAlias

from airflow_gpu_provider.broker import reasons
from airflow_gpu_provider.broker.flavors import canonical_model
from airflow_gpu_provider.broker.model import (
    Claim,
    Device,
    DeviceId,
    Fleet,
    GpuRequest,
    Lease,
    LeaseId,
    NodeName,
    Reason,
    ReasonCode,
)
from airflow_gpu_provider.exceptions import InvalidRequest

#: Whether a device is down, and how late it will be.
_Rank: TypeAlias = tuple[bool, float]

_CLOCK = "%Y-%m-%d %H:%M UTC"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Devices for an owner from ``starts_at`` until ``ends_at``: the named ones, or ``number`` of a model."""

    id: str
    starts_at: datetime
    ends_at: datetime
    by: str
    team: str | None = None
    dag_id: str | None = None
    devices: frozenset[DeviceId] = frozenset()
    number: int = 0
    model: str | None = None  #: with ``number``; None = of any model

    def __post_init__(self) -> None:
        if self.starts_at >= self.ends_at:
            raise InvalidRequest(
                f"reservation {self.id} ends at {self.ends_at:{_CLOCK}}, not after its start at "
                f"{self.starts_at:{_CLOCK}}: give a later end"
            )
        if bool(self.devices) == (self.number > 0):
            raise InvalidRequest(
                f"reservation {self.id} has {len(self.devices)} named devices and number={self.number}: "
                "name devices, or give a number of 1 or more, not both"
            )
        if self.team is None and self.dag_id is None:
            raise InvalidRequest(f"reservation {self.id} is for nobody: give a team or a DAG")

    def is_for(self, claim: Claim | None) -> bool:
        """Return whether a claim may use the devices; of a team's DAG where both are given."""
        if claim is None:
            return False
        return self.team in (None, claim.team) and self.dag_id in (None, claim.dag_id)

    def overlaps(self, other: Reservation) -> bool:
        """Return whether both hold at some moment."""
        return self.starts_at < other.ends_at and other.starts_at < self.ends_at


@dataclass(frozen=True, slots=True)
class ReservationPolicy:
    """How reserved devices may be used before."""

    #: so long before the start, claims that promise no end are kept off
    notice: timedelta = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Kept:
    """A device that is kept for a reservation."""

    device: DeviceId
    reservation: Reservation
    opens_in_s: float  #: 0 = the reservation has started


def keep(
    reservations: Iterable[Reservation], fleet: Fleet, leases: Iterable[Lease], now: datetime
) -> tuple[Kept, ...]:
    """Return which devices are kept for which reservation; fewer than asked where there are no more."""
    open_ones = [each for each in reservations if each.ends_at > now]
    holders = _holders(leases) if any(each.number for each in open_ones) else {}
    down = {node.name for node in fleet.nodes if node.unavailable is not None}
    chosen: list[tuple[Reservation, frozenset[DeviceId]]] = []
    for reservation in sorted(open_ones, key=lambda each: (not each.devices, each.starts_at, each.id)):
        if not reservation.number:
            chosen.append((reservation, reservation.devices & {device.id for device in _devices(fleet)}))
            continue
        taken = {name for other, names in chosen if other.overlaps(reservation) for name in names}
        by_rank: defaultdict[_Rank, list[Device]] = defaultdict(list)
        for device in _devices(fleet):
            if device.id not in taken and _is_of(device, reservation.model):
                is_down = device.unavailable is not None or device.node in down
                by_rank[is_down, _lateness(reservation, holders.get(device.id, ()), now)].append(device)
        chosen.append((reservation, _first(by_rank, reservation.number)))
    return tuple(
        Kept(name, reservation, max(0.0, (reservation.starts_at - now).total_seconds()))
        for reservation, names in chosen
        for name in sorted(names)
    )


def closed_to(
    claim: Claim, kept: Iterable[Kept], policy: ReservationPolicy | None = None
) -> frozenset[DeviceId]:
    """Return the kept devices that a claim may not be given now."""
    notice_s = (policy or ReservationPolicy()).notice.total_seconds()
    runtime = claim.request.max_runtime_s
    return frozenset(
        each.device
        for each in kept
        if not each.reservation.is_for(claim)
        and (each.opens_in_s <= notice_s if runtime is None else runtime > each.opens_in_s)
    )


def overstayers(kept: Iterable[Kept], leases: Iterable[Lease]) -> frozenset[LeaseId]:
    """Return the leases of others on devices whose reservation has started."""
    holders = _holders(leases)
    return frozenset(
        lease.id
        for each in kept
        if each.opens_in_s == 0.0
        for lease in holders.get(each.device, ())
        if not each.reservation.is_for(lease.claim)
    )


def reserved_reason(request: GpuRequest, kept: Iterable[Kept], closed: frozenset[DeviceId]) -> Reason:
    """Return the reason of a claim that could start but for kept devices; names who keeps most."""
    in_way = [each for each in kept if each.device in closed]
    counts = Counter(each.reservation.id for each in in_way)
    most = max(in_way, key=lambda each: (counts[each.reservation.id], each.reservation.id)).reservation
    owner = most.dag_id if most.team is None else most.team
    return Reason(
        ReasonCode.RESERVED,
        f"asked {reasons.asked(request)}; {len(closed)} free or suitable device(s) are reserved, "
        f"{counts[most.id]} for {owner} from {most.starts_at:{_CLOCK}} until {most.ends_at:{_CLOCK}}; "
        "a max_runtime that ends before that start would let it pass",
    )


def conflict(new: Reservation, others: Iterable[Reservation], fleet: Fleet) -> str | None:
    """Return why a new reservation cannot be kept beside the others; None = it can, if all are in order."""
    devices = {device.id: device for device in _devices(fleet)}
    unknown = new.devices - devices.keys()
    if unknown:
        return f"the fleet has no device {', '.join(sorted(unknown))}: take names from the list of devices"
    rivals = [each for each in others if each.id != new.id and each.overlaps(new)]
    named = {name: each for each in rivals for name in each.devices}
    for name in sorted(new.devices & named.keys()):
        return f"device {name} is reserved by {named[name].id} until {named[name].ends_at:{_CLOCK}}"
    # Never more at once than all that overlap the new one together: safe, and easy to explain.
    able = [device for device in devices.values() if _is_of(device, new.model)]
    taken = sum(len(each.devices & {device.id for device in able}) for each in rivals)
    taken += sum(each.number for each in rivals if _may_share(each.model, new.model))
    asked = new.number or len(new.devices)
    if asked > len(able) - taken:
        return (
            f"asked {asked} x {new.model or 'GPU'}; the fleet has {len(able)}, {taken} of them may be taken "
            "by reservations at the same time: lower the number or choose another time"
        )
    return None


def _may_share(one: str | None, other: str | None) -> bool:
    return one is None or other is None or canonical_model(one) == canonical_model(other)


def _devices(fleet: Fleet) -> Iterable[Device]:
    return (device for node in fleet.nodes for device in node.devices)


def _is_of(device: Device, model: str | None) -> bool:
    return model is None or canonical_model(device.model) == canonical_model(model)


def _holders(leases: Iterable[Lease]) -> Mapping[DeviceId, Sequence[Lease]]:
    holders: defaultdict[DeviceId, list[Lease]] = defaultdict(list)
    for lease in leases:
        for device in lease.devices:
            holders[device].append(lease)
    return holders


def _lateness(reservation: Reservation, holders: Sequence[Lease], now: datetime) -> float:
    """Return by how much a device will be late; below 0 = the owner has it already."""
    if not holders:
        return 0.0
    start = max(now, reservation.starts_at)
    return max((_late_s(each, start) for each in holders if not reservation.is_for(each.claim)), default=-1.0)


def _late_s(lease: Lease, start: datetime) -> float:
    """Return by how many seconds a lease overstays a start; without a promise, for ever."""
    if lease.ends_by is None:
        return float("inf")
    return max(0.0, (lease.ends_by - start).total_seconds())


def _first(by_rank: Mapping[_Rank, Sequence[Device]], number: int) -> frozenset[DeviceId]:
    """Return devices by rank; of equal rank those of the node that has most of them first."""
    found: list[DeviceId] = []
    for rank in sorted(by_rank):
        on_node: defaultdict[NodeName, list[DeviceId]] = defaultdict(list)
        for device in by_rank[rank]:
            on_node[device.node].append(device.id)
        for node in sorted(on_node, key=lambda name: (-len(on_node[name]), name)):
            found += sorted(on_node[node])
            if len(found) >= number:
                return frozenset(found[:number])
    return frozenset(found)
