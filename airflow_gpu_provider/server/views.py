"""The fleet, the queue and the leases as rows for people: the same for the page, the CLI and the API."""

from __future__ import annotations

from datetime import datetime

from airflow_gpu_provider import __version__
from airflow_gpu_provider.broker.drain import DrainScope
from airflow_gpu_provider.broker.model import WHOLE_DEVICE
from airflow_gpu_provider.broker.reasons import asked
from airflow_gpu_provider.exceptions import LeaseLost
from airflow_gpu_provider.reports import DeviceReport
from airflow_gpu_provider.resizes import OfferView, ResizeAnswer
from airflow_gpu_provider.rows import (
    DeviceRow,
    HolderRow,
    LeaseRow,
    NodeRow,
    QueueRow,
    Status,
)
from airflow_gpu_provider.server.auth import lease_secret
from airflow_gpu_provider.server.board import Entry
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.held import HeldDevices, OpenOffer
from airflow_gpu_provider.server.places import places
from airflow_gpu_provider.server.reported import unavailable_reason
from airflow_gpu_provider.server.scores import Scores
from airflow_gpu_provider.wire import ClaimState, ClaimView, DeviceView, LeaseView, TaskKey


def task_name(key: TaskKey) -> str:
    """Return `dag.task[map] run` in one string."""
    index = "" if key.map_index < 0 else f"[{key.map_index}]"
    return f"{key.dag_id}.{key.task_id}{index} {key.run_id} try {key.try_number}"


def claim_view(broker: Broker, entry: Entry, *, with_lease: bool) -> ClaimView:
    """Return where a claim stands; `with_lease` only for its holder, since a lease carries its secret."""
    starts_in_s = None
    if entry.expected_at is not None:
        starts_in_s = max(0.0, (entry.expected_at - broker.clock()).total_seconds())
    held = entry.held
    return ClaimView(
        claim_id=entry.claim_id,
        key=entry.body.key,
        state=entry.state,
        reason_code=entry.reason_code,
        reason=entry.reason,
        position=entry.position,
        starts_in_s=starts_in_s,
        lease=_lease_view(broker, entry.claim_id, held) if with_lease and held is not None else None,
    )


def _lease_view(broker: Broker, claim_id: str, held: HeldDevices) -> LeaseView:
    members = len(held.devices)
    views = [_device_view(broker, *part) for part in held.parts]
    return LeaseView(
        lease_id=held.lease_id,
        claim_id=claim_id,
        epoch=held.epoch,
        secret=lease_secret(broker.signing_key, held.lease_id, held.epoch),
        devices=views[:members],
        spares=views[members:],
        match_degree=held.match_degree,
        granted_at=held.granted_at,
        expires_at=held.expires_at,
        ttl_s=broker.settings.lease_ttl_s,
        latency_ms=broker.mirror.latencies_among(held.nodes),
    )


def resize_answer(broker: Broker, entry: Entry) -> ResizeAnswer:
    """Return a lease and its open offer, for its holder. Raise LeaseLost when it ended meanwhile."""
    held = entry.held
    if held is None:
        raise LeaseLost(f"The lease of claim {entry.claim_id} has just ended.")
    offer = None if held.offer is None else _offer_view(broker, held.offer)
    return ResizeAnswer(
        lease=_lease_view(broker, entry.claim_id, held),
        offer=offer,
        request=entry.request,
        wanted_back=held.wanted_back,
    )


def _offer_view(broker: Broker, open_offer: OpenOffer) -> OfferView:
    offer = open_offer.offer
    members = offer.request.gpus
    shares = offer.shares or (WHOLE_DEVICE,) * len(offer.devices)
    views = [_device_view(broker, *part) for part in zip(offer.devices, shares, strict=True)]
    return OfferView(
        offer_id=open_offer.id,
        phase=offer.phase,
        devices=views[:members],
        spares=views[members:],
        moves=list(offer.moves),
        expires_at=offer.expires_at,
        expires_in_s=max(0.0, (offer.expires_at - broker.clock()).total_seconds()),
    )


def _device_view(broker: Broker, device_id: str, milli: int) -> DeviceView:
    known = broker.mirror.device(device_id)
    if known is None:
        raise LeaseLost(f"No agent reports the leased device {device_id} any more.", reason="device_gone")
    device, node = known
    return DeviceView(
        id=device.id,
        node=node.name,
        host=node.host,
        model=device.model,
        memory_mib=device.memory_mib,
        tflops=broker.mirror.tflops(device),
        simulated=device.simulated,
        milli=milli,
    )


def nodes(broker: Broker) -> list[NodeRow]:
    """Return all nodes with their devices."""
    now = broker.clock()
    drained = {(drain.scope, drain.target): str(drain) for drain in broker.drains.in_force()}
    holders = _holders(broker)
    rows = []
    for stored in broker.mirror.stored():
        report = stored.report
        stale = broker.mirror.stale_reason(stored, now)
        drain = drained.get((DrainScope.NODE, report.name))
        rows.append(
            NodeRow(
                name=report.name,
                host=report.host,
                cpu_cores=report.cpu_cores,
                memory_mib=report.memory_mib,
                load=report.load,
                state="stale" if stale else "drained" if drain else "ready",
                why="; ".join(why for why in (drain, stale) if why) or None,
                report_age_s=round((now - stored.reported_at).total_seconds(), 1),
                artifacts=list(report.artifacts or ()),
                latency_ms={name: ms for name, ms in report.latency_ms.items() if ms is not None},
                loss=report.loss,
                devices=[
                    _device_row(
                        device,
                        stale,
                        drain or drained.get((DrainScope.DEVICE, device.id)),
                        holders.get(device.id, []),
                        broker.mirror.also_reported_by(device.id, report.name),
                        broker.mirror.tflops(device),
                    )
                    for device in report.devices
                ],
            )
        )
    return rows


def _holders(broker: Broker) -> dict[str, list[HolderRow]]:
    """Return who holds each device."""
    found: dict[str, list[HolderRow]] = {}
    for entry in broker.entries():
        if entry.held is None:
            continue
        task = task_name(entry.body.key)
        for device, milli in entry.held.taken().items():
            row = HolderRow(task=task, lease_id=entry.held.lease_id, share=milli / WHOLE_DEVICE)
            found.setdefault(device, []).append(row)
    return found


def _device_row(
    device: DeviceReport,
    stale: str | None,
    drain: str | None,
    holders: list[HolderRow],
    owner: str | None,
    tflops: float,
) -> DeviceRow:
    fault = unavailable_reason(device)
    if owner is not None:
        holders, fault = [], f"also reported by node {owner}, to which it belongs"
    why = "; ".join(each for each in (drain, stale, fault) if each) or None
    left = 0.0 if why else round(1.0 - sum(each.share for each in holders), 3)
    leased = "shared" if left > 0 else "leased"
    states = ((leased, holders), ("stale", stale), ("drained", drain), ("unavailable", fault))
    state = next((name for name, holds in states if holds), "free")
    return DeviceRow(
        id=device.id,
        model=device.model,
        memory_mib=device.memory_mib,
        tflops=tflops,
        state=state,
        why=why,
        # A stale measurement is not a measurement.
        utilisation=None if stale else device.utilisation,
        memory_used_mib=None if stale else device.memory_used_mib,
        temperature_c=None if stale else device.temperature_c,
        power_w=None if stale else device.power_w,
        simulated=device.simulated,
        holders=holders,
        free=left,
    )


def queue(broker: Broker) -> list[QueueRow]:
    """Return the pending claims, next first; those that have just come and have no place yet come last."""
    now = broker.clock()
    scores = Scores(broker.settings.cycle_policy(), broker.mirror.fleet(now), now)
    waiting = (entry for entry in broker.entries() if entry.state is ClaimState.PENDING)
    return [
        QueueRow(
            claim_id=entry.claim_id,
            key=entry.body.key,
            request=entry.body.request,
            asked=asked(entry.body.request.to_request()),
            value=entry.body.value,
            completes=entry.body.completes,
            **scores.of(entry.claim()),
            run_type=entry.body.run_type,
            team=entry.body.team,
            submitted_at=entry.submitted_at,
            waiting_s=round((now - entry.submitted_at).total_seconds(), 1),
            position=place.position,
            reason_code=place.reason_code,
            reason=place.reason,
            starts_in_s=_seconds_until(place.expected_at, now),
            preemptions=entry.preemptions,
        )
        for entry, place in places(waiting, scores.rank, now)
    ]


def _seconds_until(moment: datetime | None, now: datetime) -> float | None:
    return None if moment is None else max(0.0, round((moment - now).total_seconds(), 1))


def leases(broker: Broker) -> list[LeaseRow]:
    """Return the live leases, oldest first."""
    now = broker.clock()
    rows = [
        LeaseRow(
            lease_id=held.lease_id,
            key=entry.body.key,
            request=entry.request,
            owner=entry.body.owner,
            team=entry.body.team,
            devices=[device for device, _ in held.parts],
            shares=[milli / WHOLE_DEVICE for _, milli in held.parts],
            nodes=list(held.nodes),
            granted_at=held.granted_at,
            expires_in_s=round((held.expires_at - now).total_seconds(), 1),
            epoch=held.epoch,
            move=_move(held),
            taken_back=_taken_back(held),
        )
        for entry in broker.entries()
        if (held := entry.held) is not None
    ]
    return sorted(rows, key=lambda row: (row.granted_at, row.lease_id))


def _taken_back(held: HeldDevices) -> str | None:
    """Return for whom a lease has to end, when and why."""
    taken = held.taken_back
    return None if taken is None else f"ends by {taken.ends_at:%H:%M:%S} UTC: {taken.why}"


def _move(held: HeldDevices) -> str | None:
    """Return the open offer in a few words."""
    if held.offer is None:
        return None
    offer = held.offer.offer
    moves = ", ".join(f"{old} to {new}" for old, new in offer.moves)
    return f"{offer.phase.value} until {offer.expires_at:%H:%M:%S UTC}: {moves}"


def status(broker: Broker) -> Status:
    """Return the figures of the whole broker."""
    totals = broker.figures.totals()
    return Status(
        version=__version__,
        leader=broker.leadership.current(),
        nodes=totals.nodes,
        devices=totals.devices,
        free=totals.free,
        pending=totals.pending,
        leases=totals.leases,
        trouble=broker.upkeep.reconciler.trouble(broker.clock()),
    )
