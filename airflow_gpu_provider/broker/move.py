"""The move of a lease to another place, from its offer to its end.

The holder is *offered* a move: the new place is held for it, it *accepts*, moves its state, and *commits*.
Until then the old place stays its own, and an offer that runs out frees only the new one: so a share is never
given twice and never lost on the way. What an offer holds must be taken from the free capacity (`held_by`),
and a commit written in one transaction. Offers are made by `resize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum

from airflow_gpu_provider.broker.model import DeviceId, GpuRequest, Lease, LeaseId


class OfferPhase(str, Enum):
    """How far a move is."""

    OFFERED = "offered"
    """The new place is held; the holder has not answered."""
    ACCEPTED = "accepted"
    """The holder moves its state; both places are its own."""


@dataclass(frozen=True, slots=True)
class ResizePolicy:
    """How long a new place is held."""

    answer_within: timedelta = timedelta(seconds=60)
    move_within: timedelta = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Offer:
    """A move of a lease from what it is to what it would be."""

    lease_id: LeaseId
    from_devices: tuple[DeviceId, ...]
    from_request: GpuRequest
    devices: tuple[DeviceId, ...]  #: after the move, in the order of ``from_devices``
    request: GpuRequest
    expires_at: datetime
    phase: OfferPhase = OfferPhase.OFFERED
    #: milli-GPU of each device, before and after; empty = as much of each as the request says at least
    from_shares: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()

    @property
    def milli(self) -> tuple[int, ...]:
        """What the lease would hold of each device, in milli-GPU."""
        return self.shares or (self.request.milli,) * len(self.devices)

    @property
    def moves(self) -> tuple[tuple[DeviceId, DeviceId], ...]:
        """The old and the new device of each member that moves."""
        members = self.request.gpus
        pairs = zip(self.from_devices[:members], self.devices[:members], strict=True)
        return tuple((old, new) for old, new in pairs if old != new)

    def is_over(self, now: datetime) -> bool:
        """Return whether its time ran out: the new place is free again, the old one stays."""
        return now >= self.expires_at


@dataclass(frozen=True, slots=True)
class Resized:
    """The lease as it is from now on, and the devices that it gave back."""

    lease: Lease
    freed: tuple[DeviceId, ...] = ()


@dataclass(frozen=True, slots=True)
class ResizeRefused:
    """The lease stays as it is; the sentence says why and what would help."""

    reason: str


def accept(offer: Offer, now: datetime, policy: ResizePolicy | None = None) -> Offer | ResizeRefused:
    """Return the offer with time to move; accepting again changes nothing."""
    if offer.is_over(now):
        return _too_late(offer)
    if offer.phase is OfferPhase.ACCEPTED:
        return offer
    until = now + (policy or ResizePolicy()).move_within
    return replace(offer, phase=OfferPhase.ACCEPTED, expires_at=until)


def commit(offer: Offer, lease: Lease, now: datetime) -> Resized | ResizeRefused:
    """Return the lease in its new place; refused when not accepted, over, or of another lease."""
    if _is(lease, offer.devices, offer.request, offer.shares):
        return Resized(lease)  # committed already
    if offer.is_over(now):
        return _too_late(offer)
    if offer.phase is not OfferPhase.ACCEPTED:
        return ResizeRefused("the offer was not accepted: accept it before the state is moved")
    before = _is(lease, offer.from_devices, offer.from_request, offer.from_shares)
    if lease.id != offer.lease_id or not before:
        return ResizeRefused("the lease changed since the offer was made: ask again")
    return as_resized(lease, offer.devices, offer.request, offer.shares)


def held_by(offer: Offer) -> tuple[tuple[DeviceId, int], ...]:
    """Return the devices and shares that an open offer holds beyond what its lease holds."""
    before = offer.from_shares or (offer.from_request.milli,) * len(offer.from_devices)
    own = dict(zip(offer.from_devices, before, strict=True))
    after = zip(offer.devices, offer.milli, strict=True)
    held = ((device, milli - own.get(device, 0)) for device, milli in after)
    return tuple((device, milli) for device, milli in held if milli > 0)


def as_resized(
    lease: Lease, devices: Sequence[DeviceId], request: GpuRequest, shares: tuple[int, ...]
) -> Resized:
    """Return the lease with these devices, ``shares`` of them and this request, and what it gave back."""
    freed = tuple(device for device in lease.devices if device not in devices)
    return Resized(replace(lease, devices=tuple(devices), request=request, shares=shares), freed)


def _is(lease: Lease, devices: tuple[DeviceId, ...], request: GpuRequest, shares: tuple[int, ...]) -> bool:
    return (lease.devices, lease.request, lease.shares) == (devices, request, shares)


def _too_late(offer: Offer) -> ResizeRefused:
    return ResizeRefused(
        f"the offer ran out at {offer.expires_at:%H:%M:%S UTC}; the old devices are still held: go on there, "
        "or ask again"
    )
