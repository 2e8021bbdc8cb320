"""Take leases back for blocked claims: looked for once a second, and only while some may be taken.

May be taken are the leases of preemptible claims, those that teams borrowed while quotas are set, and for the
owners of a reservation those of others on its devices once it has started. What a walk hides from a blocked
claim, this does not count on. What is under way is in `taking_back`; the next step is the turn of
`engine.Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from airflow_gpu_provider.broker.capacity import Capacity, Part
from airflow_gpu_provider.broker.classes import ClassKey
from airflow_gpu_provider.broker.fair_share import FairShare
from airflow_gpu_provider.broker.holdings import Holdings
from airflow_gpu_provider.broker.keeping import Keeping
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.model import Claim, ClaimId, Lease, LeaseId, Preemption
from airflow_gpu_provider.broker.placement import Placer
from airflow_gpu_provider.broker.preemption import Rights, fits_without, plan
from airflow_gpu_provider.broker.preemption_policy import PreemptionPolicy
from airflow_gpu_provider.broker.taking_back import TakingBack

if TYPE_CHECKING:
    from airflow_gpu_provider.broker.floor import Floor

_PAUSE = timedelta(seconds=1)
#: Blocked classes that are looked at in one turn, the first ones in the order: bounds its time.
_MOST = 50


class Takeovers:
    """Ends leases for claims, and keeps their devices for these, on what the engine keeps."""

    def __init__(
        self, policy: PreemptionPolicy, layout: Layout, live: Iterable[Lease], ended: Iterable[Lease]
    ) -> None:
        self.back = TakingBack(layout, live=live, ended=ended)
        self._policy = policy
        self._next_at = datetime.min.replace(tzinfo=timezone.utc)
        self._spared: list[LeaseId] = []

    def build(
        self,
        layout: Layout,
        holdings: Holdings,
        capacity: Capacity,
        touch: Callable[[Part], None],
    ) -> None:
        """Go on with another fleet; what is kept is taken from its capacity."""
        self.back = self.back.renewed(layout)
        self._holdings = holdings
        self._capacity = capacity
        self._touch = touch
        capacity.take_all(self.back.parts())

    def end(self, lease_id: LeaseId) -> None:
        """Free the devices of a lease, or keep them for the claim that it ended for."""
        found = self._holdings.remove(lease_id)
        if found is not None:
            if not self.back.keep(*found):
                self._capacity.give(found[1])
            self._touch(found[1])

    def stop(self, claim_id: ClaimId, *, is_placed: bool = False) -> None:
        """Free what is kept for a claim, unless it got it, and spare the leases that had to end for it."""
        parts, running = self.back.stop(claim_id)
        for part in parts:
            if not is_placed:  # else the walk has given it
                self._capacity.give(part)
            self._touch(part)
        self._spared += filter(self._holdings.spare, running)

    def take_spared(self) -> tuple[LeaseId, ...]:
        """Return the leases that were spared since the last call."""
        spared, self._spared = tuple(self._spared), []
        return spared

    def search(self, floor: Floor, keeping: Keeping, now: datetime) -> Search | None:
        """Return what looks for leases in this turn, for all who wait.

        None = it is too early, or there is nobody to take from.
        """
        if now < self._next_at or self._policy.budget <= 0:
            return None
        able = {lease.id: lease for lease in self._holdings.preemptible()}
        overstayers = keeping.overstayers(self._holdings, now)
        for lease_id in (*floor.share.borrowed(), *overstayers):
            if (lease := self._holdings.get(lease_id)) is not None:
                able[lease_id] = lease
        if not able and not self.back:
            return None
        self._next_at = now + _PAUSE
        floor.touch_all()
        judges = self._holdings, self._capacity, floor.placer, floor.share, self.back
        return Search(self._policy, able, *judges, keeping, overstayers, now)

    def begin(self, search: Search) -> list[Claim]:
        """Take back what was found; return the claims that wait by themselves now, or no longer do."""
        for _, found in search.found:
            self.back.begin(found)
        for claim in search.given_up:
            self.stop(claim.id)
        return [*(claim for claim, _ in search.found), *search.given_up]


class Search:
    """One look along the blocked claims of a walk."""

    def __init__(
        self,
        policy: PreemptionPolicy,
        able: dict[LeaseId, Lease],
        holdings: Holdings,
        capacity: Capacity,
        placer: Placer,
        share: FairShare,
        back: TakingBack,
        keeping: Keeping,
        overstayers: frozenset[LeaseId],
        now: datetime,
    ) -> None:
        self._policy = policy
        self._able = able
        self._holdings = holdings
        self._capacity = capacity
        self._placer = placer
        self._share = share
        self._back = back
        self._keeping = keeping
        self._overstayers = overstayers
        self._now = now
        self._left = _MOST
        self.found: list[tuple[Claim, Preemption]] = []
        self.given_up: list[Claim] = []  #: those that can still not start though all has ended for them

    def look(self, claim: Claim, key: ClassKey) -> bool:
        """Decide whether leases are taken back for a claim that is blocked; return whether some are."""
        self._left -= 1
        found = self._plan(claim, key) if self._able and self._left >= 0 else None
        if found is not None:
            self._holdings.take_back(found)
            for lease_id in found.victims:
                del self._able[lease_id]
            self.found.append((claim, found))
            return True
        if self._back.is_over(claim.id):
            self.given_up.append(claim)
        return claim.id in self._back

    def _plan(self, claim: Claim, key: ClassKey) -> Preemption | None:
        reclaimable = self._share.reclaimable(claim)
        if self._overstayers and self._keeping.owned_by(claim):
            reclaimable |= self._overstayers
        rights = Rights(reclaimable, self._share.protected(claim, self._able.values()))
        groups = self._placer.groups(key.request, key.excluded)
        kept = self._back.kept_for(claim.id)
        fits = fits_without(self._capacity, key.request, *groups, kept=kept)
        return plan(claim, self._leases_for(claim), fits, self._now, self._policy, rights=rights)

    def _leases_for(self, claim: Claim) -> list[Lease]:
        """Return those that may be taken, and those that already end for the claim."""
        coming = (self._holdings.get(lease_id) for lease_id in self._back.running_for(claim.id))
        return [*self._able.values(), *(lease for lease in coming if lease is not None)]
