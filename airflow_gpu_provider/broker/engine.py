"""The broker's state between turns: what `cycle.decide` decides, at a cost per event.

The owner tells what happened (`submit`, `withdraw`, `end`, `renew`, `set_fleet`) and asks for a `turn`. A
turn takes the devices of its placements at once, so the next one cannot give them out again; the owner
answers each placement with `granted`, or with `not_granted` when it could not be written. Pure: no clock,
no store, no chance. The next step is the transaction of `server.leader`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from airflow_gpu_provider.broker.cycle import decide
from airflow_gpu_provider.broker.model import (
    Claim,
    ClaimId,
    CyclePolicy,
    Decisions,
    Fleet,
    GpuRequest,
    Lease,
    LeaseId,
    Placement,
    Snapshot,
    Waiting,
)

_NEVER = datetime.max


class Engine:
    """Fleet, live leases, granted placements and the queue; each call tells one event."""

    def __init__(
        self,
        policy: CyclePolicy,
        fleet: Fleet,
        leases: Iterable[Lease] = (),
        claims: Iterable[Claim] = (),
        recent: Iterable[GpuRequest] = (),
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._leases = {lease.id: lease for lease in leases}
        self._claims = {claim.id: claim for claim in claims}
        self._recent = tuple(recent)
        #: placed by a turn, not yet answered
        self._pending: dict[ClaimId, tuple[Claim, Lease]] = {}

    # -- events
    def set_fleet(self, fleet: Fleet, now: datetime) -> None:
        """Take the fleet as it is now; cheap when only load or availability of some nodes changed."""
        self._fleet = fleet

    def submit(self, claim: Claim) -> None:
        """Add a claim to the queue; a claim that is known already changes nothing."""
        if claim.id not in self._pending and not self._is_served(claim.id):
            self._claims.setdefault(claim.id, claim)

    def withdraw(self, claim_id: ClaimId) -> None:
        """Forget a claim that waits; unknown ones change nothing."""
        self._claims.pop(claim_id, None)

    def end(self, lease_id: LeaseId) -> None:
        """Free the devices of a lease that was released, expired or revoked."""
        self._leases.pop(lease_id, None)

    def renew(self, lease_id: LeaseId, expires_at: datetime) -> None:
        """Move the end of a lease; unknown ones change nothing."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._leases[lease_id] = replace(lease, expires_at=expires_at)

    def granted(self, placement: Placement, lease: Lease) -> None:
        """Confirm that a placement was written as this lease, or learn a lease that was made elsewhere."""
        self._pending.pop(placement.claim_id, None)
        self._claims.pop(placement.claim_id, None)
        self._leases[lease.id] = lease

    def not_granted(self, claim_id: ClaimId) -> None:
        """Take a placement back that could not be written: its claim waits again."""
        claim, _ = self._pending.pop(claim_id)
        self._claims[claim_id] = claim

    # -- decisions
    def turn(self, now: datetime) -> Decisions:
        """Return what to write now: ended leases, rejections and placements; ``waiting`` stays empty."""
        decisions = decide(self._snapshot(now), now, self._policy)
        for lease_id in decisions.expired:
            self._leases.pop(lease_id)
        for rejection in decisions.rejections:
            self._claims.pop(rejection.claim_id)
        for placement in decisions.placements:
            claim = self._claims.pop(placement.claim_id)
            self._pending[claim.id] = (claim, _as_lease(claim, placement, now))
        return replace(decisions, waiting=())

    def standing(self, claim_id: ClaimId, now: datetime) -> Waiting | None:
        """Return where a claim stands; None = it does not wait here."""
        return next((each for each in self.waiting(now) if each.claim_id == claim_id), None)

    def waiting(self, now: datetime, limit: int | None = None) -> tuple[Waiting, ...]:
        """Return where the claims stand, the next one first."""
        return decide(self._snapshot(now), now, self._policy).waiting[:limit]

    def validate(self) -> None:
        """Raise `AssertionError` when the state contradicts itself."""
        if self._claims.keys() & self._pending.keys():
            raise AssertionError("a claim both waits and is placed")

    def _is_served(self, claim_id: ClaimId) -> bool:
        return any(lease.claim_id == claim_id for lease in self._leases.values())

    def _snapshot(self, now: datetime) -> Snapshot:
        placed = (lease for _, lease in self._pending.values())
        leases = (*self._leases.values(), *placed)
        return Snapshot(self._fleet, leases, tuple(self._claims.values()), self._recent)


def _as_lease(claim: Claim, placement: Placement, now: datetime) -> Lease:
    return Lease(
        id=LeaseId(f"placed:{claim.id}"),
        claim_id=claim.id,
        devices=placement.devices + placement.spares,
        request=claim.request,
        granted_at=now,
        expires_at=_NEVER.replace(tzinfo=now.tzinfo),
    )
