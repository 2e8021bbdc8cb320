"""Give a running lease more or less: memory in place, else on another device; more or fewer members.

What fits beside what others hold becomes the new lease at once, and what is given back is free at once. Where
memory must be found elsewhere, the holder is offered a move and keeps its old place until it has moved: that
is the next step, `move`. Growing never takes what is kept for those who wait: `Room` does not show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol, TypeAlias

from airflow_gpu_provider.broker.model import WHOLE_DEVICE, DeviceId, GpuRequest, Lease
from airflow_gpu_provider.broker.move import Offer, Resized, ResizePolicy, ResizeRefused, as_resized
from airflow_gpu_provider.broker.units import show


class Room(Protocol):
    """What is free for a lease that grows: beyond all leases, offers, and what is kept for waiting claims."""

    def free_milli(self, device: DeviceId) -> int:
        """Return the free share of a device; 0 for one that is not offered."""
        ...

    def memory_mib(self, device: DeviceId) -> int:
        """Return the size of a device; 0 for one that left the fleet."""
        ...

    def find(self, request: GpuRequest, excluded: frozenset[DeviceId]) -> Sequence[DeviceId] | None:
        """Return free devices for all of a request, or None."""
        ...


Decision: TypeAlias = Resized | Offer | ResizeRefused


@dataclass(frozen=True, slots=True)
class Wish:
    """What a lease should become: so much memory on each device, or so many members."""

    memory_mib: int | None = None
    gpus: int | None = None
    leave: tuple[DeviceId, ...] = ()  #: the devices whose members go, with ``gpus``


def resize(
    lease: Lease,
    wish: Wish,
    room: Room,
    now: datetime,
    *,
    open_offer: Offer | None = None,
    policy: ResizePolicy | None = None,
) -> Decision:
    """Return what becomes of the lease by a wish, which may be told again."""
    if (wish.memory_mib is None) == (wish.gpus is None):
        return ResizeRefused("ask for memory or for a number of members, one of them at a time")
    if wish.memory_mib is not None:
        return resize_memory(lease, wish.memory_mib, room, now, open_offer=open_offer, policy=policy)
    assert wish.gpus is not None
    return resize_members(lease, wish.gpus, room, now, leave=wish.leave, open_offer=open_offer)


def resize_memory(
    lease: Lease,
    memory_mib: int,
    room: Room,
    now: datetime,
    *,
    open_offer: Offer | None = None,
    policy: ResizePolicy | None = None,
) -> Decision:
    """Return the lease with so much memory on each device, or an offer to move, or why neither.

    Asking again for what an open offer would give returns that offer. Less memory is given back at once.
    """
    if memory_mib < 1:
        return ResizeRefused(f"asked {memory_mib} MiB for each device: ask for 1 or more")
    wanted = _with_memory(lease, memory_mib, room)
    if open_offer is not None and not open_offer.is_over(now):
        if open_offer.request.memory_mib == memory_mib and open_offer.from_devices == lease.devices:
            return open_offer
        return _busy(open_offer)
    if lease.ends_for is not None:
        return _ends(lease)
    more = wanted.milli - lease.request.milli
    stays = {
        device
        for device in lease.devices
        if _can_stay(device, memory_mib, more, room) or _is_less(lease, wanted)
    }
    members, spares = _members(lease), _spares(lease)
    # A spare does no work yet: what cannot stay is given back, not moved.
    kept_spares = tuple(device for device in spares if device in stays)
    leaving = [device for device in members if device not in stays]
    if not leaving:
        return as_resized(lease, members + kept_spares, wanted)
    found = room.find(_part(wanted, len(leaving)), _excluded(lease))
    if found is None:
        return ResizeRefused(_no_memory(lease, memory_mib, len(leaving), room))
    new_of = dict(zip(leaving, found, strict=True))
    devices = tuple(new_of.get(device, device) for device in members) + kept_spares
    until = now + (policy or ResizePolicy()).answer_within
    return Offer(lease.id, lease.devices, lease.request, devices, wanted, until)


def resize_members(
    lease: Lease,
    gpus: int,
    room: Room,
    now: datetime,
    *,
    leave: Sequence[DeviceId] = (),
    open_offer: Offer | None = None,
) -> Resized | ResizeRefused:
    """Return the lease with ``gpus`` members: all that join or none; its own spares join first.

    ``leave`` names the devices whose members go, else the last ones do. CPU and host memory grow and shrink
    with the members.
    """
    if gpus < 1:
        return ResizeRefused(f"asked {gpus} members: ask for 1 or more, or release the lease")
    if open_offer is not None and not open_offer.is_over(now):
        return _busy(open_offer)
    if gpus == lease.request.gpus and not set(leave) & set(lease.devices):
        return Resized(lease)  # done already
    if gpus > lease.request.gpus:
        return _ends(lease) if lease.ends_for is not None else _join(lease, gpus, room)
    return _leave(lease, gpus, tuple(leave))


# -- memory
def _with_memory(lease: Lease, memory_mib: int, room: Room) -> GpuRequest:
    """Return the request with more memory; a lease of a share gets the share that so much memory is."""
    request = lease.request
    if request.milli == WHOLE_DEVICE:
        return replace(request, memory_mib=memory_mib)
    smallest = min((room.memory_mib(device) for device in _members(lease)), default=0)
    milli = _share(memory_mib, smallest)
    if request.milli != _share(request.memory_mib, smallest):
        # The share was asked for its compute, not for its memory: it never becomes less.
        milli = max(milli, request.milli)
    return replace(request, memory_mib=memory_mib, milli=milli)


def _share(memory_mib: int, of_mib: int) -> int:
    """Return the share of a device that so much memory is, rounded up; all of it where it is too small."""
    return WHOLE_DEVICE if of_mib < memory_mib else max(1, -(-WHOLE_DEVICE * memory_mib // of_mib))


def _is_less(lease: Lease, wanted: GpuRequest) -> bool:
    return wanted.milli <= lease.request.milli and wanted.memory_mib <= lease.request.memory_mib


def _can_stay(device: DeviceId, memory_mib: int, more_milli: int, room: Room) -> bool:
    if room.memory_mib(device) < memory_mib:
        return False
    return more_milli <= 0 or room.free_milli(device) >= more_milli


def _no_memory(lease: Lease, memory_mib: int, leaving: int, room: Room) -> str:
    largest = max((room.memory_mib(device) for device in lease.devices), default=0)
    return (
        f"asked {show(memory_mib)} on each of {lease.request.gpus} device(s); {leaving} cannot give that "
        f"beside what others hold (the largest has {show(largest)}), and no {leaving} free device(s) can "
        "elsewhere; ask again later, or for less"
    )


# -- members
def _join(lease: Lease, gpus: int, room: Room) -> Resized | ResizeRefused:
    request, spares = lease.request, _spares(lease)
    wanted = _part(request, gpus)
    own = spares[: gpus - request.gpus]
    lacking = gpus - request.gpus - len(own)
    found: Sequence[DeviceId] = ()
    if lacking:
        free = room.find(_part(request, lacking), _excluded(lease))
        if free is None:
            return ResizeRefused(
                f"asked {gpus} members, has {request.gpus} and {len(spares)} spare(s); no {lacking} free "
                "device(s) that suit it can join; ask again later, or for fewer"
            )
        found = free
    devices = (*_members(lease), *own, *found, *spares[len(own) :])
    return as_resized(lease, devices, replace(wanted, spares=request.spares))


def _leave(lease: Lease, gpus: int, leave: tuple[DeviceId, ...]) -> Resized | ResizeRefused:
    members = _members(lease)
    number = lease.request.gpus - gpus
    gone = leave or members[gpus:]
    strangers = [device for device in gone if device not in members]
    if strangers or len(set(gone)) != number:
        return ResizeRefused(
            f"asked {gpus} of {lease.request.gpus} members, so {number} leave, but {len(gone)} device(s) "
            f"were named, {len(strangers)} of them no member's: name the devices of those that leave"
        )
    devices = tuple(device for device in lease.devices if device not in gone)
    return as_resized(lease, devices, replace(_part(lease.request, gpus), spares=lease.request.spares))


def _part(request: GpuRequest, gpus: int) -> GpuRequest:
    """Return the request of so many members, with their part of the CPU and host memory."""
    return replace(
        request,
        gpus=gpus,
        spares=0,
        cpu_cores=request.cpu_cores * gpus / request.gpus,
        host_memory_mib=-(-request.host_memory_mib * gpus // request.gpus),
    )


# -- both
def _members(lease: Lease) -> tuple[DeviceId, ...]:
    return lease.devices[: lease.request.gpus]


def _spares(lease: Lease) -> tuple[DeviceId, ...]:
    return lease.devices[lease.request.gpus :]


def _excluded(lease: Lease) -> frozenset[DeviceId]:
    return frozenset(lease.devices) | (lease.claim.excluded if lease.claim else frozenset())


def _busy(offer: Offer) -> ResizeRefused:
    return ResizeRefused(
        f"a move of {len(offer.moves)} member(s) is {offer.phase.value} until "
        f"{offer.expires_at:%H:%M:%S UTC}: commit or decline it first"
    )


def _ends(lease: Lease) -> ResizeRefused:
    return ResizeRefused(
        f"the lease is being taken back for claim {lease.ends_for}: write a checkpoint and release"
    )
