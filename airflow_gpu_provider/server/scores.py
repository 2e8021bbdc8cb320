"""What a waiting claim counts for the order, and why: for people, as the core reckons it.

Computed where the queue is shown, on any replica, from the claim, settings and fleet that the leader has too.
Teams' quotas come before it. The next step is `views.queue`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow_gpu_provider.broker.artifact_affinity import lacking
from airflow_gpu_provider.broker.model import Claim, CyclePolicy, Fleet
from airflow_gpu_provider.broker.rank import Rank, aged, rank, score
from airflow_gpu_provider.server.board import Entry


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of claims at a moment."""

    policy: CyclePolicy
    fleet: Fleet
    now: datetime

    def of(self, claim: Claim) -> dict[str, Any]:
        """Return the columns of a claim's row."""
        found, waited = score(claim, self.policy, self._there(claim)), aged(claim, self.now, self.policy)
        return {"score": round(found.points + waited, 2), "score_why": found.explain(waited)}

    def rank(self, entry: Entry) -> Rank:
        """Return the place of a waiting claim in the order, by itself."""
        claim = entry.claim()
        return rank(claim, self.now, self.policy, self._there(claim))

    def _there(self, claim: Claim) -> float:
        """Return the part of what a claim reads that the node with most of it holds."""
        if not claim.request.artifacts:
            return 1.0
        return 1.0 - float(lacking(self.fleet.nodes, claim.request).min(initial=1.0))
