"""Give a running lease more or less: memory in place, else on another device; more or fewer members.

What fits beside what others hold becomes the new lease at once, and what is given back is free at once. Where
memory must be found elsewhere, the holder is offered a move and keeps its old place until it has moved: that
is the next step, `move`. Growing never takes what is kept for those who wait: `Room` does not show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol, TypeAlias

from airflow_gpu_provider.broker.model import DeviceId, GpuRequest, Lease
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

    def model(self, device: DeviceId) -> str | None:
        """Return the model of a device; None for one that left the fleet."""
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
    least: int | None = None  #: with ``gpus``: as many members as there are, between these two

    def is_more(self, request: GpuRequest) -> bool:
        """Return whether it asks for more than a lease is now."""
        return (self.memory_mib or 0) > request.memory_mib or (self.gpus or 0) > request.gpus


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
    wanted = replace(lease.request, memory_mib=memory_mib)
    if open_offer is not None and not open_offer.is_over(now):
        if open_offer.request.memory_mib == memory_mib and open_offer.from_devices == lease.devices:
            return open_offer
        return _busy(open_offer)
    if lease.ends_for is not None:
        return _ends(lease)
    held = dict(zip(lease.devices, lease.milli, strict=True))
    is_less = memory_mib <= lease.request.memory_mib
    stays = {device for device in lease.devices if is_less or _can_stay(device, held[device], wanted, room)}
    members, spares = _members(lease), _spares(lease)
    # A spare does no work yet: what cannot stay is given back, not moved.
    kept_spares = tuple(device for device in spares if device in stays)
    leaving = [device for device in members if device not in stays]
    if not leaving:
        devices = members + kept_spares
        return as_resized(lease, devices, wanted, _shares(devices, wanted, room, held))
    found = room.find(_part(wanted, len(leaving)), _excluded(lease))
    if found is None:
        return ResizeRefused(_no_memory(lease, memory_mib, len(leaving), room))
    new_of = dict(zip(leaving, found, strict=True))
    devices = tuple(new_of.get(device, device) for device in members) + kept_spares
    until = now + (policy or ResizePolicy()).answer_within
    return Offer(
        lease.id,
        lease.devices,
        lease.request,
        devices,
        wanted,
        until,
        from_shares=lease.shares,
        shares=_shares(devices, wanted, room, held),
    )


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
def _shares(
    devices: Sequence[DeviceId], request: GpuRequest, room: Room, held: Mapping[DeviceId, int]
) -> tuple[int, ...]:
    """Return what the request takes of each device; of one that left the fleet, what is ``held`` of it."""
    if not request.is_shared:
        return ()
    sizes = ((device, room.memory_mib(device)) for device in devices)
    return tuple(request.milli_on(size) if size else held[device] for device, size in sizes)


def _can_stay(device: DeviceId, held_milli: int, wanted: GpuRequest, room: Room) -> bool:
    size = room.memory_mib(device)
    if size < wanted.memory_mib:
        return False
    more = wanted.milli_on(size) - held_milli
    return more <= 0 or room.free_milli(device) >= more


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
        free = _like_members(lease, lacking, room)
        if free is None:
            return ResizeRefused(
                f"asked {gpus} members, has {request.gpus} and {len(spares)} spare(s); no {lacking} free "
                "device(s) that suit it can join; ask again later, or for fewer"
            )
        found = free
    devices = (*_members(lease), *own, *found, *spares[len(own) :])
    held = dict(zip(lease.devices, lease.milli, strict=True))
    shares = (held.get(device) or request.milli_on(room.memory_mib(device)) for device in devices)
    wanted = replace(wanted, spares=request.spares)
    return as_resized(lease, devices, wanted, tuple(shares) if request.is_shared else ())


def _like_members(lease: Lease, lacking: int, room: Room) -> Sequence[DeviceId] | None:
    """Return free devices of the members' models, else others: a gang works at the pace of its slowest."""
    part, models = _part(lease.request, lacking), {room.model(device) for device in _members(lease)}
    alike = replace(part, models=frozenset(model for model in models if model is not None))
    return room.find(alike, _excluded(lease)) or room.find(part, _excluded(lease))


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
    left = [number for number, device in enumerate(lease.devices) if device not in gone]
    devices = tuple(lease.devices[number] for number in left)
    shares = tuple(lease.shares[number] for number in left) if lease.shares else ()
    wanted = replace(_part(lease.request, gpus), spares=lease.request.spares)
    return as_resized(lease, devices, wanted, shares)


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
