"""What is being taken back for whom: the leases that still end, and the devices that are kept meanwhile.

A claim for which leases are taken back is a class of its own. What one of them held goes to nobody else: it
is kept until the claim starts, or is withdrawn; then the leases that still run are spared. When all have
ended and it can still not start, it keeps nothing any longer. The next step is `queue.Walk`, which gives a
claim what is kept for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime

from airflow_gpu_provider.broker import reasons
from airflow_gpu_provider.broker.capacity import Part, part_of_lease
from airflow_gpu_provider.broker.classes import ClassKey
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.model import (
    Claim,
    ClaimId,
    Lease,
    LeaseId,
    Preemption,
    Reason,
    ReasonCode,
)


@dataclass(slots=True)
class _Takeover:
    """Of one claim."""

    running: dict[LeaseId, datetime] = field(default_factory=dict)  #: leases that end for it, and when
    kept: dict[LeaseId, tuple[Lease, Part]] = field(default_factory=dict)  #: those that have ended


class TakingBack:
    """Takeovers by claim; parts belong to one layout."""

    def __init__(self, layout: Layout, *, live: Iterable[Lease] = (), ended: Iterable[Lease] = ()) -> None:
        self._layout = layout
        self._of: dict[ClaimId, _Takeover] = {}
        for lease in live:
            self._run(lease)
        for lease in ended:
            self.keep(lease, part_of_lease(layout, lease), is_new=True)

    def renewed(self, layout: Layout) -> TakingBack:
        """Return the same on another layout."""
        other = TakingBack(layout, ended=self.ended())
        for claim_id, takeover in self._of.items():
            other._of.setdefault(claim_id, _Takeover()).running.update(takeover.running)
        return other

    # -- events
    def begin(self, found: Preemption) -> None:
        """Take these leases back, beside those that already end for the claim."""
        running = self._of.setdefault(found.for_claim, _Takeover()).running
        running.update(dict.fromkeys(found.victims, found.end_by))

    def keep(self, lease: Lease, part: Part, *, is_new: bool = False) -> bool:
        """Keep what a lease held for the claim that it ended for; return False when it ended for none."""
        if lease.ends_for is None or not (is_new or lease.ends_for in self._of):
            return False
        takeover = self._of.setdefault(lease.ends_for, _Takeover())
        takeover.running.pop(lease.id, None)
        takeover.kept[lease.id] = (lease, part)
        return True

    def stop(self, claim_id: ClaimId) -> tuple[list[Part], list[LeaseId]]:
        """End a takeover: return what was kept, and the leases that need not end any more."""
        takeover = self._of.pop(claim_id, _Takeover())
        return [part for _, part in takeover.kept.values()], list(takeover.running)

    # -- facts
    def __contains__(self, claim_id: ClaimId) -> bool:
        return claim_id in self._of

    def __bool__(self) -> bool:
        return bool(self._of)

    def key_for(self, claim: Claim, key: ClassKey) -> ClassKey:
        """Return the class of a claim: its own while leases are taken back for it."""
        return key._replace(alone=claim.id) if claim.id in self._of else key

    def kept_for(self, claim_id: ClaimId | None) -> list[Part]:
        """Return what is kept for a claim."""
        takeover = None if claim_id is None else self._of.get(claim_id)
        return [] if takeover is None else [part for _, part in takeover.kept.values()]

    def running_for(self, claim_id: ClaimId) -> list[LeaseId]:
        """Return the leases that still have to end for a claim."""
        return list(self._of[claim_id].running) if claim_id in self._of else []

    def is_over(self, claim_id: ClaimId) -> bool:
        """Return whether all leases that were taken back for a claim have ended."""
        return claim_id in self._of and not self._of[claim_id].running

    def ended(self) -> list[Lease]:
        """Return the leases that have ended and whose devices are kept."""
        return [lease for each in self._of.values() for lease, _ in each.kept.values()]

    def parts(self) -> list[Part]:
        """Return all that is kept."""
        return [part for each in self._of.values() for _, part in each.kept.values()]

    def parts_on(self, nodes: Collection[int]) -> list[Part]:
        """Return what is kept on any of these nodes."""
        node_of = self._layout.node_of
        return [
            part for part in self.parts() if any(int(node_of[bank]) in nodes for bank, _, _ in part.devices)
        ]

    def reason(self, claim: Claim) -> Reason:
        """Return why a claim waits for which leases are taken back."""
        takeover = self._of[claim.id]
        kept = sum(len(lease.devices) for lease, _ in takeover.kept.values())
        return Reason(
            ReasonCode.DEVICES_TAKEN_BACK,
            f"asked {reasons.asked(claim.request)}; {len(takeover.running)} lease(s) are taken back for it"
            + (f", {kept} device(s) of others are kept already" if kept else "")
            + "; starts when these have ended",
        )

    def starts_in_s(self, claim_id: ClaimId, now: datetime) -> float:
        """Return when all leases have ended at the latest."""
        ends = self._of[claim_id].running.values()
        return max(((moment - now).total_seconds() for moment in ends), default=0.0)

    def _run(self, lease: Lease) -> None:
        if lease.ends_for is not None and lease.must_end_at is not None:
            self._of.setdefault(lease.ends_for, _Takeover()).running[lease.id] = lease.must_end_at
