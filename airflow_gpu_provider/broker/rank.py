"""A claim's place in the queue by itself: value, readiness and age, less for backfills and for large work.

Ties go by time of submission, then id. All claims age alike, so the order of two changes only when artifacts
come or go that one of them reads; it is kept as a number. What readiness adds is less than a point of value
(`CyclePolicy.readiness_boost`): it orders claims of one value, never of two. Quotas of teams come before it:
the next step is `fair_share.FairShare.place`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Score:
    """What a claim's place in the queue is made of, in points of value; the more, the sooner."""

    value: float
    ready: float  #: what its readiness adds
    work: float  #: what it loses for the work that it may be
    backfill: float  #: what it loses as a backfill

    @property
    def points(self) -> float:
        """All but its age, which counts for all claims alike."""
        return self.value - self.backfill - self.work + self.ready

    def explain(self, aged: float) -> str:
        """Return the sum for people; ``aged`` is what waiting added."""
        parts = (
            (self.ready, "+", "ready"),
            (aged, "+", "waiting"),
            (self.work, "-", "work"),
            (self.backfill, "-", "backfill"),
        )
        told = (f" {sign} {points:.2f} {name}" for points, sign, name in parts if points)
        return f"{self.points + aged:.2f} = {self.value:g} value" + "".join(told)


def score(claim: Claim, policy: CyclePolicy, there: float = 1.0) -> Score:
    """Return what a claim counts; ``there`` is the part 0..1 of what it reads that is on one node."""
    return Score(
        claim.value,
        policy.readiness_boost * readiness(claim, there),
        policy.small_first * _doublings(claim.request),
        policy.backfill_penalty if claim.run_type is RunType.BACKFILL else 0.0,
    )


def readiness(claim: Claim, there: float = 1.0) -> float:
    """Return how ready a claim is, 0..1: half for what it reads, half for how far its DAG run is.

    The last task of a run completes the work of all before it. Of a run of which nothing is known, nothing is
    added.
    """
    return (there + (claim.completes or 0.0)) / 2


def aged(claim: Claim, now: datetime, policy: CyclePolicy) -> float:
    """Return what waiting has added so far."""
    return policy.ageing_per_min * max(0.0, (now - claim.submitted_at).total_seconds() / 60)


def rank(claim: Claim, now: datetime, policy: CyclePolicy, there: float = 1.0) -> Rank:
    """Return the claim's place in the order. Who submits by a clock that is ahead counts from ``now``."""
    waits_since_min = (min(claim.submitted_at, now) - _EPOCH).total_seconds() / 60
    points = score(claim, policy, there).points
    return (policy.ageing_per_min * waits_since_min - points, claim.submitted_at, claim.id)


def _doublings(request: GpuRequest) -> float:
    """Return how often a device-minute must be doubled to be the work that a request may be."""
    runtime_s = _UNSAID_S if request.max_runtime_s is None else request.max_runtime_s
    return log2(max(1.0, request.gpus * request.milli / WHOLE_DEVICE * runtime_s / 60))


def ranked(
    claims: Iterable[Claim],
    now: datetime,
    policy: CyclePolicy,
    there: Callable[[GpuRequest], float] = lambda _: 1.0,
) -> list[tuple[Rank, Claim]]:
    """Return the claims with their ranks, the next one first; ``there`` tells the part of what one reads."""
    found = ((rank(claim, now, policy, there(claim.request)), claim) for claim in claims)
    return sorted(found, key=lambda each: each[0])
