"""What makes claims alike: one of a class can start exactly when the others can.

A turn looks at the first claim of each class only, so its cost grows with the number of classes. Whatever a
decision does not depend on is therefore left out of the key: spares always; the kind of work while nothing
was learned of it; the team while there are no quotas. The next step is `pending.Pending`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from airflow_gpu_provider.broker.model import Claim, ClaimId, DeviceId, GpuRequest, RunType


class ClassKey(NamedTuple):
    """A class of claims."""

    request: GpuRequest  #: without spares
    excluded: frozenset[DeviceId] = frozenset()
    team: str | None = None  #: None also while no team has a quota
    is_backfill: bool = False  #: only told apart where teams are: live work borrows before backfills do
    alone: ClaimId | None = None  #: the claim for which leases are taken back


@dataclass(frozen=True, slots=True)
class Classing:
    """What decisions depend on now."""

    by_team: bool = False
    learned: frozenset[str] = frozenset()  #: kinds of work of which speeds were measured

    def key(self, claim: Claim) -> ClassKey:
        """Return the class of a claim. Spares are no part of whether it can start."""
        request = self.request(claim.request)
        if request.spares:
            request = replace(request, spares=0)
        if not self.by_team:
            return ClassKey(request, claim.excluded)
        return ClassKey(request, claim.excluded, claim.team, claim.run_type is RunType.BACKFILL)

    def request(self, request: GpuRequest) -> GpuRequest:
        """Return the request without a kind of work of which nothing is known: it decides nothing."""
        if request.task_class is None or request.task_class in self.learned:
            return request
        return replace(request, task_class=None)
