"""Which leases to take back so that a blocked claim can start: the least loss of work that is enough.

Only preemptible leases of less worth, or borrowed ones that their owner's claim reclaims, may be taken; never
one that has just begun, that was preempted `PreemptionPolicy.budget` times, or that this claim was itself
preempted for. Waiting makes nobody worth more here, or equals would preempt each other in turns. The loss of
a lease is its devices times the seconds since its last checkpoint. Victims get a grace period to write one;
the next step is the owner of the leases, who ends them by then and starts the claim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeAlias

from airflow_gpu_provider.broker.capacity import Capacity, Part, part_of_lease
from airflow_gpu_provider.broker.layout import BoolArray
from airflow_gpu_provider.broker.model import (
    WHOLE_DEVICE,
    Claim,
    ClaimId,
    GpuRequest,
    Lease,
    LeaseId,
    Preemption,
    RunType,
)
from airflow_gpu_provider.broker.preemption_policy import PreemptionPolicy

#: Whether the whole gang of the claim fits once these leases have ended. More leases never fit worse.
Fits: TypeAlias = Callable[[Collection[Lease]], bool]


@dataclass(frozen=True, slots=True)
class Rights:
    """What quotas add: leases that the claim's team may reclaim, and those only their own may take."""

    reclaimable: frozenset[LeaseId] = frozenset()
    protected: frozenset[LeaseId] = frozenset()


NO_RIGHTS = Rights()


def plan(
    claim: Claim,
    leases: Iterable[Lease],
    fits: Fits,
    now: datetime,
    policy: PreemptionPolicy | None = None,
    *,
    rights: Rights = NO_RIGHTS,
) -> Preemption | None:
    """Return which leases to take back; None = it needs none, or all that may be taken are not enough.

    Leases that already end for this claim count as given back; those that end for others count as gone to
    these. No part of the set that is returned would do.
    """
    policy = policy or PreemptionPolicy()
    leases = tuple(leases)
    coming = [lease for lease in leases if lease.ends_for == claim.id]
    able = [lease for lease in leases if may_take(lease, claim, now, policy, rights)]

    def is_enough(some: Sequence[Lease]) -> bool:
        return fits([*coming, *some])

    if not able or is_enough(()):
        return None
    found = [
        least_enough(some, is_enough)
        for order in _orders(able, now)
        if (some := first_enough(order, is_enough))
    ]
    if not found:
        return None
    best = min(found, key=lambda some: (_loss_s(some, now), len(some), sorted(each.id for each in some)))
    victims = sorted(best, key=lambda lease: (loss_s(lease, now), lease.id))
    loss = _loss_s(victims, now)
    return Preemption(
        claim.id,
        tuple(lease.id for lease in victims),
        loss,
        now + policy.grace,
        _reason(claim, victims, loss, policy, rights),
    )


def may_take(
    lease: Lease,
    claim: Claim,
    now: datetime,
    policy: PreemptionPolicy,
    rights: Rights = NO_RIGHTS,
) -> bool:
    """Return whether this lease may be taken back for this claim."""
    victim = lease.claim
    if victim is None or lease.ends_for is not None or victim.preemptions >= policy.budget:
        return False
    if now - lease.granted_at < policy.least_runtime or lease.claim_id in claim.preempted_by:
        return False
    if lease.id in rights.reclaimable:
        return True
    if not victim.preemptible or lease.id in rights.protected:
        return False
    return worth(victim, policy) + policy.least_gain < worth(claim, policy)


def worth(claim: Claim, policy: PreemptionPolicy) -> float:
    """Return the value of a claim, less for a backfill; without ageing."""
    return claim.value - (policy.backfill_penalty if claim.run_type is RunType.BACKFILL else 0.0)


def loss_s(lease: Lease, now: datetime) -> float:
    """Return the device-seconds of work since the last checkpoint, or since the start without one."""
    since = max(lease.granted_at, lease.checkpoint_at or lease.granted_at)
    devices = sum(lease.milli) / WHOLE_DEVICE
    return devices * max(0.0, (now - since).total_seconds())


def after_preemption(claim: Claim, by: ClaimId) -> Claim:
    """Return the claim with which preempted work asks again: its budget is its own, apart from retries."""
    times, made_way_for = made_way(claim.preemptions, claim.preempted_by, by)
    return replace(claim, preemptions=times, preempted_by=made_way_for)


def made_way(times: int, before: Iterable[ClaimId], by: ClaimId) -> tuple[int, frozenset[ClaimId]]:
    """Return how often a claim made way, and for whom, once it has for one more."""
    return times + 1, frozenset(before) | {by}


def fits_without(
    capacity: Capacity, request: GpuRequest, *groups: BoolArray, kept: Iterable[Part] = ()
) -> Fits:
    """Return the test on what the claim sees as free, ``kept`` for it included; one of ``groups`` must do."""
    trial = capacity.copy()
    for part in kept:
        trial.give(part)
    cached_parts: dict[LeaseId, Part] = {}

    def part_of_one(lease: Lease) -> Part:
        if lease.id not in cached_parts:
            cached_parts[lease.id] = part_of_lease(trial.layout, lease)
        return cached_parts[lease.id]

    def fits(leases: Collection[Lease]) -> bool:
        parts = [part_of_one(lease) for lease in leases]
        for part in parts:
            trial.give(part)
        found = trial.fits_one_of(request, groups)
        for part in parts:
            trial.take(part)
        return found

    return fits


def first_enough(order: Sequence[Lease], is_enough: Callable[[Sequence[Lease]], bool]) -> Sequence[Lease]:
    """Return as many leases from the front as are enough, in steps that double; nothing if all are not."""
    number = 1
    while number < len(order) and not is_enough(order[:number]):
        number *= 2
    front = order[:number]
    return front if number < len(order) or is_enough(front) else ()


def least_enough(order: Sequence[Lease], is_enough: Callable[[Sequence[Lease]], bool]) -> list[Lease]:
    """Return leases that are enough together, no part of which is, preferring those that come first.

    All together must be enough, and none must not. Divides and conquers (QuickXplain): about
    k log(n / k) tests for k of n leases.
    """

    def needed(base: list[Lease], is_new: bool, some: Sequence[Lease]) -> list[Lease]:
        if is_new and is_enough(base):
            return []
        if len(some) == 1:
            return list(some)
        half = len(some) // 2
        first, second = some[:half], some[half:]
        late = needed([*base, *first], True, second)
        return needed([*base, *late], bool(late), first) + late

    return needed([], False, order)


def _orders(able: Sequence[Lease], now: datetime) -> list[list[Lease]]:
    """Return orders of preference: small losses first, and small losses for each device first.

    On 400 random fleets of 16 devices the better of both lost as little as possible in 98 % of cases and
    0.3 % more on average; the first alone 88 % and 3.5 %. A third one, by node, won nothing.
    """
    by_loss = sorted(able, key=lambda lease: (loss_s(lease, now), lease.id))
    return [by_loss, sorted(by_loss, key=lambda lease: loss_s(lease, now) / max(1, len(lease.devices)))]


def _loss_s(leases: Iterable[Lease], now: datetime) -> float:
    return sum(loss_s(lease, now) for lease in leases)


def _reason(
    claim: Claim, victims: Sequence[Lease], loss: float, policy: PreemptionPolicy, rights: Rights
) -> str:
    reclaimed = sum(lease.id in rights.reclaimable for lease in victims)
    told = f"{len(victims)} lease(s) with {sum(len(lease.devices) for lease in victims)} device(s)"
    if reclaimed:
        why = f"{reclaimed} borrowed from the quota of team {claim.team}"
    else:
        most = max(worth(lease.claim, policy) for lease in victims if lease.claim is not None)
        why = f"worth at most {most:g} against {worth(claim, policy):g}"
    return (
        f"taken back for claim {claim.id}: {told}, {why}; {loss:.0f} device-seconds since the last "
        f"checkpoints are lost; they have {policy.grace.total_seconds():g} s to write one"
    )
