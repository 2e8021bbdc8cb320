"""A claim's place in the queue by itself: value, plus ageing, less for backfill runs and for large work.

Ties go by time of submission, then id. All claims age alike, so the order of two never changes and is kept as
a number. Quotas of teams come before it: the next step is `fair_share.FairShare.place`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from math import log2
from typing import TypeAlias

from airflow_gpu_provider.broker.model import (
    WHOLE_DEVICE,
    Claim,
    ClaimId,
    CyclePolicy,
    GpuRequest,
    RunType,
)

#: How long a claim counts that promises no end: as long work, so that a promise never moves it back.
_UNSAID_S = 4 * 3600.0

_EPOCH = datetime(2020, 1, 1, tzinfo=timezone.utc)

#: Sorts claims, the next one first.
Rank: TypeAlias = tuple[float, datetime, ClaimId]


def rank(claim: Claim, now: datetime, policy: CyclePolicy) -> Rank:
    """Return the claim's place in the order. Who submits by a clock that is ahead counts from ``now``."""
    penalty = policy.backfill_penalty if claim.run_type is RunType.BACKFILL else 0.0
    waits_since_min = (min(claim.submitted_at, now) - _EPOCH).total_seconds() / 60
    points = claim.value - penalty - policy.small_first * _doublings(claim.request)
    return (policy.ageing_per_min * waits_since_min - points, claim.submitted_at, claim.id)


def _doublings(request: GpuRequest) -> float:
    """Return how often a device-minute must be doubled to be the work that a request may be."""
    runtime_s = _UNSAID_S if request.max_runtime_s is None else request.max_runtime_s
    return log2(max(1.0, request.gpus * request.milli / WHOLE_DEVICE * runtime_s / 60))


def ordered(claims: Iterable[Claim], now: datetime, policy: CyclePolicy) -> list[Claim]:
    """Return the claims, the next one first."""
    return sorted(claims, key=lambda claim: rank(claim, now, policy))
