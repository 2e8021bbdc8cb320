"""One cycle of the broker: from what is to what shall be.

A function of (snapshot, now, policy), without clock, store or chance: the same snapshot gives the same
decisions, so a cycle seen in production can be replayed as a test. First leases past their time end, then
claims that became impossible are rejected, then the queue is walked. This builds everything anew; it is
what `engine.Engine`, which keeps its state between turns, is measured against.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from airflow_gpu_provider.broker.admission import Admission
from airflow_gpu_provider.broker.capacity import Capacity, Part, part_of_lease
from airflow_gpu_provider.broker.diagnosis import Outlook
from airflow_gpu_provider.broker.fragmentation import Mix
from airflow_gpu_provider.broker.keeping import Keeping
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.model import (
    Claim,
    CyclePolicy,
    Decisions,
    Lease,
    Rejection,
    Snapshot,
)
from airflow_gpu_provider.broker.placement import Placer
from airflow_gpu_provider.broker.queue import Holds, Walk, class_of, ordered
from airflow_gpu_provider.broker.speed_costs import SpeedCosts
from airflow_gpu_provider.broker.standing import World, standings


def decide(snapshot: Snapshot, now: datetime, policy: CyclePolicy) -> Decisions:
    """Return what to write: ended leases, rejections, placements, and where the waiting claims stand."""
    live = [lease for lease in snapshot.leases if lease.expires_at > now]
    expired = tuple(lease.id for lease in snapshot.leases if lease.expires_at <= now)
    claims = _without_lease(snapshot.claims, live)
    if not claims:
        return Decisions(expired=expired)
    layout = Layout.of(snapshot.fleet)
    rejections, admitted = _admit(layout, claims)
    parts = [part_of_lease(layout, lease) for lease in live]
    capacity = Capacity.idle(layout, max_load=policy.max_load)
    capacity.take_all(parts)
    asked = snapshot.recent or [*(lease.request for lease in live), *(claim.request for claim in admitted)]
    speeds = SpeedCosts(layout.kinds)
    speeds.renew(asked)
    placer = Placer(capacity, Mix.of(layout, asked), cost_band=policy.cost_band, speeds=speeds)
    outlook = Outlook(layout, max_load=policy.max_load)
    endings = promised(live, parts, now)
    queue = ordered(admitted, now, policy)
    keeping = Keeping(policy.reservation_notice, snapshot.reservations, snapshot.kept)
    keeping.renew(now, snapshot.fleet, live, ())
    walk = Walk(capacity, placer, Holds(capacity, placer, outlook, lambda: endings))
    keys = ((claim, keeping.key_for(claim, class_of(claim), now)) for claim in queue)
    begun = {claim.id: claim.request for claim, key in keys if walk.visit(claim, key)}
    placed = walk.end()
    endings += [
        (seconds, part)
        for placement, part in placed
        if (seconds := begun[placement.claim_id].max_runtime_s) is not None
    ]
    still = (claim for claim in queue if claim.id not in begun)
    waiting = standings(still, World(capacity, placer, outlook, keeping, now), endings)
    return Decisions(tuple(placement for placement, _ in placed), rejections, waiting, expired)


def promised(live: Iterable[Lease], parts: Iterable[Part], now: datetime) -> list[tuple[float, Part]]:
    """Return what ends when, in seconds from now; broken promises are no promises."""
    return [
        ((ends_by - now).total_seconds(), part)
        for lease, part in zip(live, parts, strict=True)
        if (ends_by := lease.ends_by) is not None and ends_by > now
    ]


def _without_lease(claims: Iterable[Claim], live: Iterable[Lease]) -> list[Claim]:
    """Leave out claims that hold devices already: a claim read twice must not get them twice."""
    served = {lease.claim_id for lease in live}
    return [claim for claim in claims if claim.id not in served]


def _admit(layout: Layout, claims: Iterable[Claim]) -> tuple[tuple[Rejection, ...], list[Claim]]:
    admission = Admission(layout)
    rejections: list[Rejection] = []
    admitted: list[Claim] = []
    for claim in claims:
        reason = admission.reject_reason(claim.request, claim.excluded)
        if reason is None:
            admitted.append(claim)
        else:
            rejections.append(Rejection(claim.id, reason))
    return tuple(rejections), admitted
