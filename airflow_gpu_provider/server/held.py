"""What a claim holds: a live lease, its devices and how much of each, and the move that it is offered."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from airflow_gpu_provider.broker.model import WHOLE_DEVICE, DeviceId
from airflow_gpu_provider.broker.move import Offer, OfferPhase, held_by
from airflow_gpu_provider.wire import RequestBody


@dataclass(frozen=True, slots=True)
class OpenOffer:
    """A move that a live lease is offered, under the name by which its holder answers."""

    id: str
    offer: Offer

    @property
    def arrivals(self) -> tuple[DeviceId, ...]:
        """The devices that are held for it and are not the lease's own yet."""
        return tuple(device for device in self.offer.devices if device not in self.offer.from_devices)


@dataclass(frozen=True, slots=True)
class TakenFor:
    """For whom a live lease is being taken back, until when, and why."""

    claim_id: str
    ends_at: datetime
    why: str


@dataclass(slots=True)
class HeldDevices:
    """A live lease."""

    lease_id: str
    epoch: int
    devices: tuple[str, ...]
    spares: tuple[str, ...]
    nodes: tuple[str, ...]
    match_degree: float
    granted_at: datetime
    expires_at: datetime
    collected: bool
    request: RequestBody | None = None  #: of a resized lease; None = what the claim asked
    offer: OpenOffer | None = None
    moved_by: str | None = None  #: the offer that was committed last
    shares: tuple[int, ...] = ()  #: milli-GPU of each device, then of each spare; empty = whole devices
    taken_back: TakenFor | None = None
    checkpoint_at: datetime | None = None
    #: so many of the last devices would let others start, as the leader found when the holder asked last
    wanted_back: int = 0

    def until(self, moment: datetime) -> datetime:
        """Return that moment, or when it has to end before that."""
        return moment if self.taken_back is None else min(moment, self.taken_back.ends_at)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Each device and spare with what is held of it, in milli-GPU."""
        devices = (*self.devices, *self.spares)
        return tuple(zip(devices, self.shares or (WHOLE_DEVICE,) * len(devices), strict=True))

    def at_work(self) -> tuple[str, ...]:
        """Return the devices that its holder may use: both places while it moves."""
        moves = self.offer is not None and self.offer.offer.phase is OfferPhase.ACCEPTED
        return (*self.devices, *self.spares, *(self.offered() if moves else ()))

    def offered(self) -> tuple[str, ...]:
        """Return the devices that are held for a move."""
        return () if self.offer is None else self.offer.arrivals

    def taken(self) -> Counter[str]:
        """Return what nobody else can have of each device, in milli-GPU: also what is held for a move."""
        taken: Counter[str] = Counter(dict(self.parts))
        if self.offer is not None:
            taken.update(dict(held_by(self.offer.offer)))
        return taken
