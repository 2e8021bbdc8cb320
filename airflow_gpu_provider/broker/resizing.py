"""Change live leases: more or less of them, or a move, on what the engine keeps.

What becomes of a lease is decided by `resize` and `move`; here it is taken from the free capacity and given
back. A lease grows only into what a new claim at the end of the queue would see: neither what waiting claims
keep nor what is reserved for others. The old place stays the lease's own until a commit. The next step is the
transaction of the server's leader.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime

from airflow_gpu_provider.broker import move
from airflow_gpu_provider.broker.capacity import part_of
from airflow_gpu_provider.broker.classes import ClassKey
from airflow_gpu_provider.broker.floor import Floor
from airflow_gpu_provider.broker.keeping import Keeping
from airflow_gpu_provider.broker.matching import match_degree
from airflow_gpu_provider.broker.model import Lease, LeaseId
from airflow_gpu_provider.broker.move import Offer, Resized, ResizePolicy, ResizeRefused
from airflow_gpu_provider.broker.pending import Pending
from airflow_gpu_provider.broker.resize import Decision, Wish, resize
from airflow_gpu_provider.broker.room import FreeRoom
from airflow_gpu_provider.broker.wanted_back import wanted_back

_NO_OFFER = ResizeRefused(
    "no move of this lease is open: its offer ran out, was declined, or was never made; the old devices are "
    "still held: go on there, or ask again"
)


@dataclass(frozen=True, slots=True)
class Fitted:
    """What became of a lease that takes what is idle, and how many of its last members others wait for."""

    resized: Resized
    wanted_back: int = 0


class Resizing:
    """Changes of the leases in some holdings. None, where a lease or decision is returned: it is not live."""

    def __init__(
        self, floor: Floor, pending: Pending, keeping: Keeping, policy: ResizePolicy | None = None
    ) -> None:
        self._floor = floor
        self._holdings = floor.holdings
        self._capacity = floor.capacity
        self._placer = floor.placer
        self._share = floor.share
        self._pending = pending
        self._keeping = keeping
        self._policy = policy

    def resize(self, lease_id: LeaseId, wish: Wish, now: datetime) -> Decision | None:
        """Change a lease by a wish at once, or offer it a move, or say why neither."""
        lease = self._holdings.get(lease_id)
        if lease is None:
            return None
        open_offer = self._holdings.offer_of(lease_id)
        with self._room_for(lease, now) as room:
            found = resize(lease, wish, room, now, open_offer=open_offer, policy=self._policy)
        refusal = self._share.growth_refusal(lease, _milli_of(found))
        if refusal is not None and found != open_offer:
            return ResizeRefused(refusal)
        if isinstance(found, Resized):
            self._become(lease, found.lease)
        elif isinstance(found, Offer) and found != open_offer:
            self.decline(lease_id)
            self._capacity.take(self._holdings.hold(found))
        return found

    def fit(self, lease_id: LeaseId, wish: Wish, now: datetime) -> Fitted | None:
        """Let a lease have as many members as there are in the bounds of a wish; never fewer than it has.

        None of them while some of what it has beyond the least would let others start.
        """
        lease = self._holdings.get(lease_id)
        if lease is None or wish.gpus is None or wish.least is None:
            return None
        if wanted := self._wanted_back(lease, wish.least, now):
            return Fitted(Resized(lease), wanted)
        spares = len(lease.devices) - lease.request.gpus
        # On a full fleet nothing is searched.
        idle = spares + int((self._capacity.milli >= lease.request.milli).sum())
        became, more = Resized(lease), min(idle, wish.gpus - lease.request.gpus)
        while more > 0:
            found = self.resize(lease_id, Wish(gpus=became.lease.request.gpus + more), now)
            if isinstance(found, Resized):
                became, more = found, min(more, wish.gpus - found.lease.request.gpus)
            else:
                more //= 2
        return Fitted(became)

    def _wanted_back(self, lease: Lease, least: int, now: datetime) -> int:
        layout, members = self._capacity.layout, lease.devices[: lease.request.gpus]
        places = [layout.place_of[name] for name in reversed(members[least:]) if name in layout.place_of]
        if not places:
            return 0
        surplus = [part_of(layout, lease.request, [place]) for place in places]
        kinds = self._floor.kinds_around(members[least:])
        near = [each for each in self._pending.classes.values() if each.kinds & kinds]
        heads = list(self._pending.heads(self._share, near))
        if not self._share.is_on:  # with quotas, what one gets moves its team's others back
            heads = [each for each in heads for _ in each.queue[: len(surplus)]]
        waiting = (
            self._keeping.key_for(each.first, each.key, now)
            for each in heads
            if not self._share.is_over_limit(each.first)
        )
        return wanted_back(surplus, waiting, self._capacity, self._placer)

    def accept(self, lease_id: LeaseId, now: datetime) -> Offer | ResizeRefused | None:
        """Give the holder time to move to what it was offered."""
        offer = self._holdings.offer_of(lease_id)
        if offer is None:
            return self._no_offer(lease_id)
        found = move.accept(offer, now, self._policy)
        if isinstance(found, Offer):
            self._holdings.hold(found)
        return found

    def commit(self, lease_id: LeaseId, now: datetime) -> Resized | ResizeRefused | None:
        """Let the lease be in its new place, and free the old one."""
        lease, offer = self._holdings.get(lease_id), self._holdings.offer_of(lease_id)
        if lease is None or offer is None:
            return self._no_offer(lease_id)
        found = move.commit(offer, lease, now)
        if isinstance(found, Resized):
            self._become(lease, found.lease)
        return found

    def decline(self, lease_id: LeaseId) -> Offer | None:
        """Free the new place of an open offer and return the offer; the lease stays as it is."""
        offer, part = self._holdings.offer_of(lease_id), self._holdings.let_go(lease_id)
        if part is not None and offer is not None:
            self._capacity.give(part)
            self._floor.touch_devices(offer.devices)
        return offer

    def lapse(self, now: datetime) -> tuple[LeaseId, ...]:
        """Free the new places of the offers whose time ran out; return whose they were."""
        over = tuple(offer.lease_id for offer in self._holdings.offers() if offer.is_over(now))
        for lease_id in over:
            self.decline(lease_id)
        return over

    def match_degree(self, lease: Lease) -> float:
        """Return the degree of the weakest member that the fleet still has, measured where that is known."""
        layout, request = self._capacity.layout, lease.request
        places = (layout.place_of.get(device) for device in lease.devices[: request.gpus])
        members = (layout.device(*place) for place in places if place)
        known = self._placer.speeds(request.task_class)
        speeds = (known.of(member.model, member.tflops) for member in members)
        return min((match_degree(speed, request.min_tflops) for speed in speeds), default=1.0)

    def _no_offer(self, lease_id: LeaseId) -> ResizeRefused | None:
        return None if self._holdings.get(lease_id) is None else _NO_OFFER

    def _become(self, before: Lease, after: Lease) -> None:
        """Give back all of the lease as it was, with what an offer kept for it, and take it as it is."""
        if after == before:
            return
        found = self._holdings.remove(before.id)
        assert found is not None
        self._capacity.give(found[1])
        self._capacity.take(self._holdings.add(after))
        self._floor.touch_devices(before.devices)

    @contextmanager
    def _room_for(self, lease: Lease, now: datetime) -> Iterator[FreeRoom]:
        """Yield what is free behind all who wait for anything that the lease could grow into."""
        any_size = replace(lease.request, memory_mib=0)
        by_rating = replace(any_size, task_class=None)  # a strict lease may be judged by either: `strictness`
        kinds = self._floor.kinds_of(ClassKey(any_size)) | self._floor.kinds_of(ClassKey(by_rating))
        kinds |= self._floor.kinds_around(lease.devices)
        holds = self._floor.holds(now)
        near = self._floor.regions.around(kinds, None, self._pending.classes.values())
        try:
            for waiting in self._pending.heads(self._share, near):
                if self._share.is_over_limit(waiting.first):
                    continue  # it waits for its own team, and keeps nothing from others
                holds.keep(self._keeping.key_for(waiting.first, waiting.key, now))
            closed = self._keeping.closed_to(lease.claim, now)
            yield FreeRoom(self._capacity, self._placer, closed)
        finally:
            holds.let_go()


def _milli_of(found: Decision) -> int:
    """Return what the lease would hold in all, in milli-GPU; 0 where it stays as it is."""
    if isinstance(found, Resized):
        return sum(found.lease.milli)
    if isinstance(found, Offer):
        return sum(found.milli)
    return 0
