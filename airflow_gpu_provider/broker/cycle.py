"""One cycle of the broker: from what is to what shall be.

A function of (snapshot, now, policy), without clock, store or chance: the same snapshot gives the same
decisions, so a cycle seen in production can be replayed as a test. First leases past their time end, then
claims that became impossible are rejected, then the queue is walked. This builds everything anew; it is
what `engine.Engine`, which keeps its state between turns, is measured against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime

from airflow_gpu_provider.broker.admission import Admission
from airflow_gpu_provider.broker.capacity import Capacity, Part, part_of_lease
from airflow_gpu_provider.broker.classes import Classing
from airflow_gpu_provider.broker.diagnosis import Outlook
from airflow_gpu_provider.broker.fair_share import FairShare
from airflow_gpu_provider.broker.fragmentation import Mix
from airflow_gpu_provider.broker.intake import Intake
from airflow_gpu_provider.broker.keeping import Keeping
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.model import (
    Claim,
    CyclePolicy,
    Decisions,
    Lease,
    LeaseId,
    Placement,
    Snapshot,
)
from airflow_gpu_provider.broker.placement import Placer
from airflow_gpu_provider.broker.queue import Holds, Walk
from airflow_gpu_provider.broker.quota import NO_QUOTAS, Quotas
from airflow_gpu_provider.broker.rank import Rank, ranked
from airflow_gpu_provider.broker.speed_costs import SpeedCosts
from airflow_gpu_provider.broker.standing import World, standings
from airflow_gpu_provider.broker.taking_back import TakingBack


def decide(snapshot: Snapshot, now: datetime, policy: CyclePolicy, quotas: Quotas = NO_QUOTAS) -> Decisions:
    """Return what to write: ended leases, rejections, placements, and where the waiting claims stand."""
    live = [lease for lease in snapshot.leases if lease.expires_at > now]
    over = [lease for lease in snapshot.leases if lease.expires_at <= now]
    expired = tuple(lease.id for lease in over)
    claims = _without_lease(snapshot.claims, live)
    if not claims:
        return Decisions(expired=expired)
    layout, share = Layout.of(snapshot.fleet), FairShare(quotas, snapshot.fleet, live)
    intake = Intake(policy)
    for claim in claims:
        intake.add(claim)
    admitted, rejections = intake.judge(Admission(layout), layout, now, share.never_reason)
    parts = [part_of_lease(layout, lease) for lease in live]
    waits = {claim.id for claim in admitted}
    ended = (lease for lease in (*snapshot.taken_back, *over) if lease.ends_for in waits)
    back = TakingBack(layout, live=(lease for lease in live if lease.ends_for in waits), ended=ended)
    capacity = Capacity.idle(layout, max_load=policy.max_load)
    capacity.take_all([*parts, *back.parts()])
    classing = Classing(share.is_on)
    asked = snapshot.recent or [*(lease.request for lease in live), *(claim.request for claim in admitted)]
    asked = [classing.request(request) for request in asked]
    speeds = SpeedCosts(layout.kinds)
    speeds.renew(asked)
    placer = Placer(capacity, Mix.of(layout, asked), cost_band=policy.cost_band, speeds=speeds)
    outlook = Outlook(layout, max_load=policy.max_load)
    endings = promised(live, parts, now)
    queue = ranked(admitted, now, policy, placer.there)
    keeping = Keeping(policy.reservation_notice, snapshot.reservations, snapshot.kept)
    keeping.renew(now, snapshot.fleet, live, ())
    walk = Walk(capacity, placer, Holds(capacity, placer, outlook, lambda: endings), share, back)
    owns = ((c, back.key_for(c, classing.key(c))) for c in _one_by_one(queue, share))
    keys = ((claim, keeping.key_for(claim, own, now)) for claim, own in owns)
    begun = {claim.id: claim for claim, key in keys if walk.visit(claim, key)}
    placed = walk.end()
    for placement, part in placed:
        claim = begun[placement.claim_id]
        if claim.request.max_runtime_s is not None:
            endings.append((claim.request.max_runtime_s, part))
        share.hold(_lease(placement, claim, now))
        back.stop(claim.id)
    still = [each for each in queue if each[1].id not in begun]
    world = World(capacity, placer, outlook, share, classing, keeping, back, now)
    granted_in_turn = _one_by_one(still, share, count=share.count)
    waiting = standings(granted_in_turn, _one_by_one(still, share), world, endings)
    waiting += intake.waiting(len(waiting))
    return Decisions(tuple(placement for placement, _ in placed), tuple(rejections), waiting, expired)


def _one_by_one(
    queue: Iterable[tuple[Rank, Claim]], share: FairShare, *, count: Callable[[Claim], None] | None = None
) -> Iterator[Claim]:
    """Yield claims that are in the order of their ranks; with quotas the best placed each time anew."""
    left = list(queue)
    if not share.is_on:
        yield from (claim for _, claim in left)
        return
    while left:
        best = min(left, key=lambda each: share.place(each[1], each[0]))
        left.remove(best)
        yield best[1]
        if count is not None:
            count(best[1])
    if count is not None:
        share.assume_nothing()


def _lease(placement: Placement, claim: Claim, now: datetime) -> Lease:
    devices, shares = placement.devices + placement.spares, placement.shares
    return Lease(LeaseId(claim.id), claim.id, devices, claim.request, now, now, shares, claim)


def promised(live: Iterable[Lease], parts: Iterable[Part], now: datetime) -> list[tuple[float, Part]]:
    """Return what ends when, in seconds from now; broken promises are no promises."""
    return [
        ((ends_by - now).total_seconds(), part)
        for lease, part in zip(live, parts, strict=True)
        if (ends_by := lease.ends_by) is not None and ends_by > now and lease.ends_for is None
    ]


def _without_lease(claims: Iterable[Claim], live: Iterable[Lease]) -> list[Claim]:
    """Leave out claims that hold devices already: a claim read twice must not get them twice."""
    served = {lease.claim_id for lease in live}
    return [claim for claim in claims if claim.id not in served]
