"""Devices that people reserved ahead: which ones are kept, and who may use them meanwhile.

A reservation is for a team or a DAG. It names devices, or a number of them of a model; then those that will
be free when it starts are chosen, again and again, so that a failed device is replaced by another. Its owner
may use them at any time, others only if they promise to end before it starts; without a promise they may
until a notice before. Nothing is taken from a lease here: those that overstay are named, and
taking back is the business of `preemption`. The next step is `keeping`, which keeps the choice up to date.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeAlias

from airflow_gpu_provider.broker.flavors import canonical_model
from airflow_gpu_provider.broker.model import (
    Claim,
    Device,
    DeviceId,
    Fleet,
    Lease,
    LeaseId,
    NodeName,
)
from airflow_gpu_provider.exceptions import InvalidRequest

#: Whether a device is down, how late it will be, and whether another one was kept before.
_Rank: TypeAlias = tuple[bool, float, bool]

#: So long before a start, claims that promise no end are kept off.
NOTICE = timedelta(hours=1)

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
    reason: str = ""  #: why, for people

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
        for name, text in (("team", self.team), ("dag_id", self.dag_id), ("model", self.model)):
            if text is not None and not text.strip():
                raise InvalidRequest(f"reservation {self.id} has an empty {name}: give a name, or none")
        if self.devices and self.model is not None:
            raise InvalidRequest(
                f"reservation {self.id} names devices and model={self.model}: leave the model out, it goes "
                "with a number"
            )

    @property
    def owner(self) -> str:
        """Whose it is, for people."""
        names = (("team", self.team), ("DAG", self.dag_id))
        return ", ".join(f"{kind} {name}" for kind, name in names if name is not None)

    def is_for(self, claim: Claim | None) -> bool:
        """Return whether a claim may use the devices; of a team's DAG where both are given."""
        if claim is None:
            return False
        return self.team in (None, claim.team) and self.dag_id in (None, claim.dag_id)

    def overlaps(self, other: Reservation) -> bool:
        """Return whether both hold at some moment."""
        return self.starts_at < other.ends_at and other.starts_at < self.ends_at


@dataclass(frozen=True, slots=True)
class Kept:
    """The devices that are kept for a reservation; fewer than asked where there are no more."""

    reservation: Reservation
    devices: frozenset[DeviceId]


def keep(
    reservations: Iterable[Reservation],
    fleet: Fleet,
    leases: Iterable[Lease],
    now: datetime,
    before: Mapping[str, frozenset[DeviceId]] | None = None,
) -> tuple[Kept, ...]:
    """Return which devices are kept for which reservation.

    ``before`` names what was kept until now, by reservation: of devices that are equally good the same ones
    stay, so that a choice does not wander.
    """
    open_ones = [each for each in reservations if each.ends_at > now]
    leases = list(leases) if any(each.number for each in open_ones) else []
    devices, bad = list(_devices(fleet)), _bad(fleet)
    there, models = {device.id for device in devices}, {device.model for device in devices}
    kept: list[Kept] = []
    for reservation in sorted(open_ones, key=lambda each: (not each.devices, each.starts_at, each.id)):
        if not reservation.number:
            kept.append(Kept(reservation, reservation.devices & there))
            continue
        taken = {name for each in kept if each.reservation.overlaps(reservation) for name in each.devices}
        own = (before or {}).get(reservation.id, frozenset())
        late = _lateness(reservation, leases, now)
        fitting = {model for model in models if _is_model(model, reservation.model)}
        by_rank: defaultdict[_Rank, list[Device]] = defaultdict(list)
        for device in devices:
            name = device.id
            if device.model in fitting and name not in taken:
                by_rank[name in bad, late.get(name, 0.0), name not in own].append(device)
        kept.append(Kept(reservation, _first(by_rank, reservation.number)))
    return tuple(kept)


def is_settled(kept: Iterable[Kept], fleet: Fleet, leases: Iterable[Lease], now: datetime) -> bool:
    """Return whether all that was asked for is kept and will be free in time."""
    bad, leases = _bad(fleet), list(leases)
    for each in kept:
        if not each.reservation.number:
            continue
        on_kept = [lease for lease in leases if not each.devices.isdisjoint(lease.devices)]
        late = _lateness(each.reservation, on_kept, now)
        if any(late.get(name, 0.0) > 0 or name in bad for name in each.devices):
            return False
        if len(each.devices) < each.reservation.number:
            return False
    return True


def closed_to(
    claim: Claim | None, kept: Iterable[Kept], now: datetime, notice: timedelta = NOTICE
) -> frozenset[DeviceId]:
    """Return the kept devices that a claim may not be given now; None = of one that nothing is known of."""
    found = [each.devices for each in _closing(claim, kept, now, notice)]
    return found[0] if len(found) == 1 else frozenset().union(*found)


def reopenings(
    claim: Claim, kept: Iterable[Kept], now: datetime, notice: timedelta = NOTICE
) -> list[tuple[float, frozenset[DeviceId]]]:
    """Return in how many seconds which devices will no longer be closed to a claim, the first ones first."""
    ends: dict[DeviceId, datetime] = {}
    for each in _closing(claim, kept, now, notice):
        for device in each.devices:
            ends[device] = max(each.reservation.ends_at, ends.get(device, each.reservation.ends_at))
    return [
        ((end - now).total_seconds(), frozenset(device for device, at in ends.items() if at == end))
        for end in sorted(set(ends.values()))
    ]


def _closing(claim: Claim | None, kept: Iterable[Kept], now: datetime, notice: timedelta) -> Iterator[Kept]:
    runtime = None if claim is None else claim.request.max_runtime_s
    least_s = notice.total_seconds() if runtime is None else runtime
    for each in kept:
        opens_in_s = max(0.0, (each.reservation.starts_at - now).total_seconds())
        is_near = opens_in_s <= least_s if runtime is None else opens_in_s < least_s
        if is_near and now < each.reservation.ends_at and not each.reservation.is_for(claim):
            yield each


def overstayers(kept: Iterable[Kept], leases: Iterable[Lease], now: datetime) -> frozenset[LeaseId]:
    """Return the leases of others on devices whose reservation has started."""
    begun = [each for each in kept if each.reservation.starts_at <= now < each.reservation.ends_at]
    holders = _holders(leases) if begun else {}
    return frozenset(
        lease.id
        for each in begun
        for device in each.devices
        for lease in holders.get(device, ())
        if not each.reservation.is_for(lease.claim)
    )


def in_the_way(claim: Claim, kept: Iterable[Kept], closed: frozenset[DeviceId], now: datetime) -> str:
    """Return for whom and until when most of the closed devices are kept, and what a claim can do."""
    rivals = [each for each in kept if not each.reservation.is_for(claim) and each.devices & closed]
    most = max(rivals, key=lambda each: (len(each.devices & closed), each.reservation.id))
    reservation, number = most.reservation, len(most.devices & closed)
    told = (
        f"{number} reserved by {reservation.by} for {reservation.owner} from "
        f"{reservation.starts_at:{_CLOCK}} until {reservation.ends_at:{_CLOCK}} ({reservation.id})"
    )
    if now < reservation.starts_at:
        return f"{told}: a max_runtime that ends before that start would let it pass"
    return f"{told}: starts when that ends, or on others"


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
    able = [device for device in devices.values() if _is_model(device.model, new.model)]
    if new.number and not able:
        there = sorted({device.model for device in devices.values()})
        return f"the fleet has no {new.model or 'GPU'}: it has {', '.join(there) or 'no devices yet'}"
    taken = sum(len(each.devices & {device.id for device in able}) for each in rivals)
    taken += sum(each.number for each in rivals if _may_share(each.model, new.model))
    asked = new.number or len(new.devices)
    taken = min(taken, len(able))
    if asked > len(able) - taken:
        at_once = f" ({', '.join(sorted(each.id for each in rivals))})" if rivals else ""
        return (
            f"asked {asked} x {new.model or 'GPU'}; the fleet has {len(able)}, {taken} of them may be taken "
            f"by reservations at the same time{at_once}: lower the number or choose "
            "another time"
        )
    return None


def _may_share(one: str | None, other: str | None) -> bool:
    return one is None or other is None or canonical_model(one) == canonical_model(other)


def _devices(fleet: Fleet) -> Iterable[Device]:
    return (device for node in fleet.nodes for device in node.devices)


def _bad(fleet: Fleet) -> frozenset[DeviceId]:
    """Return the devices that are down, or on a node that is."""
    return frozenset(
        device.id
        for node in fleet.nodes
        for device in node.devices
        if node.unavailable is not None or device.unavailable is not None
    )


def _is_model(model: str, asked: str | None) -> bool:
    return asked is None or canonical_model(model) == canonical_model(asked)


def _holders(leases: Iterable[Lease]) -> Mapping[DeviceId, Sequence[Lease]]:
    holders: defaultdict[DeviceId, list[Lease]] = defaultdict(list)
    for lease in leases:
        for device in lease.devices:
            holders[device].append(lease)
    return holders


def _lateness(reservation: Reservation, leases: Iterable[Lease], now: datetime) -> Mapping[DeviceId, float]:
    """Return by how much the devices that are held will be late; below 0 = the owner has it already."""
    start = max(now, reservation.starts_at)
    late: dict[DeviceId, float] = {}
    for lease in leases:
        seconds = -1.0 if reservation.is_for(lease.claim) else _late_s(lease, start, now)
        for device in lease.devices:
            late[device] = max(seconds, late.get(device, seconds))
    return late


def _late_s(lease: Lease, start: datetime, now: datetime) -> float:
    """Return by how many seconds a lease overstays a start; without a promise it may for ever."""
    if lease.ends_by is None or lease.ends_by <= now:
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
