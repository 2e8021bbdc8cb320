"""How a live lease changes in the tables: what it is, which devices it has, and the move it is offered.

What an offer holds beyond its lease are rows of the lease's devices that are marked as offered: what keeps
the live leases of a device within it keeps it for the offer too. All that is given up in a turn is written
before what is taken, since one lease may take what another just gave. The next step is `turns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import bindparam, delete, false, select, true, update

from airflow_gpu_provider.broker.model import DeviceId
from airflow_gpu_provider.store.script import Script, one_of
from airflow_gpu_provider.store.tables import lease, lease_device, offer


@dataclass(frozen=True, slots=True)
class LeasePlace:
    """Where a device stands among those of its lease."""

    device_id: str
    rank: int
    is_spare: bool
    node: str = ""
    is_offered: bool = False
    milli: int = 1000  #: what is held of it; 1000 = the whole device

    def row(self, lease_id: str) -> dict[str, Any]:
        """Return the row of the table."""
        return {
            "lease_id": lease_id,
            "device_id": self.device_id,
            "node": self.node,
            "rank": self.rank,
            "is_spare": int(self.is_spare),
            "milli": self.milli,
            "is_offered": self.is_offered,
            "ended_at": None,
        }


def places_of(
    parts: Iterable[tuple[str, int]], members: int, node_of: Mapping[DeviceId, str]
) -> dict[str, LeasePlace]:
    """Return where each device stands; ``parts`` are devices and what is held of each, the members first."""
    return {
        device: LeasePlace(
            device_id=device,
            rank=number - members if number >= members else number,
            is_spare=number >= members,
            node=node_of.get(DeviceId(device), ""),
            milli=milli,
        )
        for number, (device, milli) in enumerate(parts)
    }


@dataclass(frozen=True, slots=True)
class NewShape:
    """A lease that becomes another: devices that leave, join and stay or arrive from its offer."""

    lease_id: str
    request: dict[str, Any]  #: wire.RequestBody
    match_degree: float
    leave: tuple[str, ...] = ()
    join: tuple[LeasePlace, ...] = ()
    stay: tuple[LeasePlace, ...] = ()
    moved_by: str | None = None  #: the offer that this commits


@dataclass(frozen=True, slots=True)
class NewOffer:
    """A move that a lease is offered; `held` are devices that are not its own yet."""

    lease_id: str
    row: dict[str, Any]
    held: tuple[LeasePlace, ...]


@dataclass(slots=True)
class Changes:
    """What a turn changes of live leases."""

    shapes: list[NewShape] = field(default_factory=list)
    offers: list[NewOffer] = field(default_factory=list)
    accepted: dict[str, datetime] = field(default_factory=dict)  #: lease, until when it may move
    withdrawn: list[str] = field(default_factory=list)  #: leases whose offer is over

    def is_empty(self) -> bool:
        """Return whether there is nothing to write."""
        return not any((self.shapes, self.offers, self.accepted, self.withdrawn))

    def leases(self) -> list[str]:
        """Return the leases that must be live for this."""
        changed = [each.lease_id for each in self.shapes] + [each.lease_id for each in self.offers]
        return changed + list(self.accepted)


def change_all(script: Script, changes: Changes, now: datetime, otherwise: Exception) -> None:
    """Write changes; raise `otherwise` when a lease is not live any more."""
    if changes.is_empty():
        return
    if lease_ids := changes.leases():
        script.require(_LIVE, len(lease_ids), otherwise, ids=lease_ids)
    withdraw_offers(script, changes.withdrawn)
    for shape in changes.shapes:
        if shape.leave:
            script.run(_LEAVE, key=shape.lease_id, ids=shape.leave, now=now)
    for shape in changes.shapes:
        _become(script, shape)
    for new in changes.offers:
        script.insert(offer, [{"lease_id": new.lease_id, **new.row}])
        _join(script, new.lease_id, new.held)
    for lease_id, until in changes.accepted.items():
        script.require(_ACCEPT, 1, otherwise, key=lease_id, until=until)


def withdraw_offers(script: Script, lease_ids: Iterable[str]) -> None:
    """Free what the open offers of these leases hold; the leases stay as they are."""
    ids = list(lease_ids)
    if ids:
        script.run(_FREE_OFFERED, ids=ids)
        script.run(_WITHDRAW, ids=ids)


def _become(script: Script, shape: NewShape) -> None:
    for place in shape.stay:
        where = {"key": shape.lease_id, "device": place.device_id}
        script.run(_STAY, **where, at=place.rank, spare=int(place.is_spare), part=place.milli)
    _join(script, shape.lease_id, shape.join)
    script.run(_SHAPE, key=shape.lease_id, asked=shape.request, degree=shape.match_degree)
    if shape.moved_by is not None:
        script.run(_MOVED, key=shape.lease_id, by=shape.moved_by)
        script.run(_WITHDRAW, ids=[shape.lease_id])


def _join(script: Script, lease_id: str, places: Iterable[LeasePlace]) -> None:
    rows = [place.row(lease_id) for place in places]
    if rows:
        # It may have had the device before.
        script.run(_FORGET_ENDED, key=lease_id, ids=[row["device_id"] for row in rows])
        script.insert(lease_device, rows)


_LIVE = select(lease.c.id).where(one_of(lease.c.id, "ids"), lease.c.ended_at.is_(None)).with_for_update()
_OF_LEASE = lease_device.c.lease_id == bindparam("key")
_LEAVE = (
    update(lease_device)
    .where(_OF_LEASE, one_of(lease_device.c.device_id, "ids"), lease_device.c.ended_at.is_(None))
    .values(ended_at=bindparam("now"))
)
_STAY = (
    update(lease_device)
    .where(_OF_LEASE, lease_device.c.device_id == bindparam("device"), lease_device.c.ended_at.is_(None))
    .values(rank=bindparam("at"), is_spare=bindparam("spare"), milli=bindparam("part"), is_offered=false())
)
_FORGET_ENDED = delete(lease_device).where(
    _OF_LEASE, one_of(lease_device.c.device_id, "ids"), lease_device.c.ended_at.is_not(None)
)
_SHAPE = (
    update(lease)
    .where(lease.c.id == bindparam("key"))
    .values(request=bindparam("asked"), match_degree=bindparam("degree"))
)
_MOVED = update(lease).where(lease.c.id == bindparam("key")).values(moved_by=bindparam("by"))
_ACCEPT = (
    update(offer)
    .where(offer.c.lease_id == bindparam("key"))
    .values(phase="accepted", expires_at=bindparam("until"))
)
_FREE_OFFERED = delete(lease_device).where(
    one_of(lease_device.c.lease_id, "ids"),
    lease_device.c.is_offered == true(),
    lease_device.c.ended_at.is_(None),
)
_WITHDRAW = delete(offer).where(one_of(offer.c.lease_id, "ids"))
