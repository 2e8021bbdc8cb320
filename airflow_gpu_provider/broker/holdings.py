"""The live leases, the open offers to move one, and what each takes of the fleet.

Also what was placed and waits to be written: it holds its devices under the id of its claim. An offer belongs
to its lease and ends with it. Knows which lease is next to expire and whose promise is next to be broken,
without a look at the others. The next step is the turn of `engine.Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from heapq import heappop, heappush

from airflow_gpu_provider.broker.capacity import Part, part_of_lease
from airflow_gpu_provider.broker.fair_share import FairShare
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.model import ClaimId, Lease, LeaseId, Preemption
from airflow_gpu_provider.broker.move import Offer
from airflow_gpu_provider.broker.room import part_of_offer


class Holdings:
    """Leases by id, by claim and by node, offers by lease; parts belong to one layout.

    ``share`` counts them; ``seen`` is told each lease that comes, goes or breaks its promise.
    """

    def __init__(
        self,
        layout: Layout,
        leases: Iterable[Lease],
        offers: Iterable[Offer],
        share: FairShare,
        seen: Callable[[Lease], None] = lambda _: None,
    ) -> None:
        self._layout = layout
        self._share = share
        self._seen = seen
        self._held: dict[LeaseId, tuple[Lease, Part]] = {}
        self._of_claim: dict[ClaimId, LeaseId] = {}
        self._on_node: dict[int, dict[LeaseId, None]] = {}
        self._promising: dict[LeaseId, datetime] = {}
        self._preemptible: dict[LeaseId, None] = {}
        self._expiries: list[tuple[datetime, LeaseId]] = []
        self._promises: list[tuple[datetime, LeaseId]] = []
        self._offers: dict[LeaseId, tuple[Offer, Part]] = {}
        for lease in leases:
            self.add(lease)
        for offer in offers:
            self.hold(offer)

    def __iter__(self) -> Iterator[Lease]:
        return (lease for lease, _ in self._held.values())

    def __contains__(self, lease_id: LeaseId) -> bool:
        return lease_id in self._held

    def get(self, lease_id: LeaseId) -> Lease | None:
        """Return a live lease; None = it is unknown."""
        found = self._held.get(lease_id)
        return None if found is None else found[0]

    def serves(self, claim_id: ClaimId) -> bool:
        """Return whether the claim holds devices."""
        return claim_id in self._of_claim

    def parts(self) -> list[Part]:
        """Return all that is taken."""
        return [part for _, part in (*self._held.values(), *self._offers.values())]

    def parts_on(self, nodes: Iterable[int]) -> list[Part]:
        """Return what is taken on any of these nodes, each part once."""
        wanted, node_of = set(nodes), self._layout.node_of
        ids = {lease_id: None for node in wanted for lease_id in self._on_node.get(node, ())}
        offered = (part for _, part in self._offers.values())
        return [self._held[lease_id][1] for lease_id in ids] + [
            part for part in offered if any(int(node_of[bank]) in wanted for bank, _, _ in part.devices)
        ]

    def add(self, lease: Lease, part: Part | None = None) -> Part:
        """Add a lease and return what it takes."""
        part = part_of_lease(self._layout, lease) if part is None else part
        self._held[lease.id] = (lease, part)
        self._seen(lease)
        self._share.hold(lease)
        self._of_claim[lease.claim_id] = lease.id
        for node, _, _ in part.nodes:
            self._on_node.setdefault(node, {})[lease.id] = None
        heappush(self._expiries, (lease.expires_at, lease.id))
        self._promise(lease)
        if lease.claim is not None and lease.claim.preemptible:
            self._preemptible[lease.id] = None
        return part

    def remove(self, lease_id: LeaseId) -> tuple[Lease, Part] | None:
        """Forget a lease and its offer; return it with what both took. None = it is unknown."""
        found = self._held.pop(lease_id, None)
        if found is None:
            return None
        lease, part = found
        self._seen(lease)
        self._share.drop(lease_id)
        if self._of_claim.get(lease.claim_id) == lease_id:
            del self._of_claim[lease.claim_id]
        for node, _, _ in part.nodes:
            del self._on_node[node][lease_id]
        self._promising.pop(lease_id, None)
        self._preemptible.pop(lease_id, None)
        offered = self.let_go(lease_id)
        if offered is not None:
            part = Part(part.devices + offered.devices, part.nodes + offered.nodes)
        return lease, part

    # -- taking back
    def preemptible(self) -> list[Lease]:
        """Return the leases whose claims may be preempted."""
        return [self._held[lease_id][0] for lease_id in self._preemptible]

    def take_back(self, found: Preemption) -> None:
        """Let leases end for a claim, at a moment at the latest: what they promised counts no more."""
        for lease_id in found.victims:
            lease, part = self._held[lease_id]
            taken = replace(lease, ends_for=found.for_claim, must_end_at=found.end_by)
            self._held[lease_id] = (taken, part)
            self._promising.pop(lease_id, None)
            self.renew(lease_id, lease.expires_at)

    def spare(self, lease_id: LeaseId) -> bool:
        """Let a lease that was taken back go on; return False for one that has ended."""
        if lease_id not in self._held:
            return False
        lease, part = self._held[lease_id]
        lease = replace(lease, ends_for=None, must_end_at=None)
        self._held[lease_id] = (lease, part)
        self._promise(lease)
        return True

    def note_checkpoint(self, lease_id: LeaseId, moment: datetime) -> None:
        """Note when the holder of a lease last saved its work."""
        found = self._held.get(lease_id)
        if found is not None:
            self._held[lease_id] = (replace(found[0], checkpoint_at=moment), found[1])

    def _promise(self, lease: Lease) -> None:
        ends_by = lease.ends_by
        if ends_by is not None and lease.ends_for is None:
            self._promising[lease.id] = ends_by
            heappush(self._promises, (ends_by, lease.id))

    # -- offers
    def hold(self, offer: Offer) -> Part:
        """Keep what an offer needs beyond its lease, and return that."""
        part = part_of_offer(self._layout, offer)
        self._offers[offer.lease_id] = (offer, part)
        self._share.offer(offer.lease_id, sum(offer.milli))
        return part

    def offer_of(self, lease_id: LeaseId) -> Offer | None:
        """Return the open offer of a lease."""
        found = self._offers.get(lease_id)
        return None if found is None else found[0]

    def offers(self) -> list[Offer]:
        """Return all open offers."""
        return [offer for offer, _ in self._offers.values()]

    def let_go(self, lease_id: LeaseId) -> Part | None:
        """Forget the offer of a lease and return what it kept; None = there is none."""
        found = self._offers.pop(lease_id, None)
        self._share.offer(lease_id, 0)
        return None if found is None else found[1]

    # -- time

    def renew(self, lease_id: LeaseId, expires_at: datetime) -> None:
        """Move the end of a lease; one that is being taken back ends no later than it must."""
        found = self._held.get(lease_id)
        if found is None:
            return
        lease, part = found
        expires_at = min(expires_at, lease.must_end_at or expires_at)
        self._held[lease_id] = (replace(lease, expires_at=expires_at), part)
        if expires_at < lease.expires_at:
            heappush(self._expiries, (expires_at, lease_id))

    def expired(self, now: datetime) -> tuple[LeaseId, ...]:
        """Return the leases past their time; each is told once, the caller removes it."""
        over: dict[LeaseId, None] = {}  # a lease that was shortened is in the heap twice
        while self._expiries and self._expiries[0][0] <= now:
            _, lease_id = heappop(self._expiries)
            found = self._held.get(lease_id)
            if found is None:
                continue
            if found[0].expires_at <= now:
                over[lease_id] = None
            else:
                heappush(self._expiries, (found[0].expires_at, lease_id))
        return tuple(over)

    def broken(self, now: datetime) -> Iterator[Part]:
        """Yield what is held longer than was promised, each once."""
        while self._promises and self._promises[0][0] <= now:
            _, lease_id = heappop(self._promises)
            if lease_id in self._promising:
                lease, part = self._held[lease_id]
                self._seen(lease)
                yield part

    def endings(self, now: datetime) -> list[tuple[float, Part]]:
        """Return what ends when, in seconds from now; broken promises are no promises."""
        held = self._held
        return [
            ((ends_by - now).total_seconds(), held[lease_id][1])
            for lease_id, ends_by in self._promising.items()
            if ends_by > now
        ]
