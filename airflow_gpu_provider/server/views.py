"""The fleet, the queue and the leases as rows for people: the same for the page, the CLI and the API."""

from __future__ import annotations

from airflow_gpu_provider import __version__
from airflow_gpu_provider.broker.model import RunType
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.fleet import unavailable_reason
from airflow_gpu_provider.store.repository import task_key
from airflow_gpu_provider.wire import (
    DeviceReport,
    DeviceRow,
    LeaseRow,
    NodeRow,
    QueueRow,
    RequestBody,
    Status,
    TaskKey,
)


def task_name(key: TaskKey) -> str:
    """Return `dag.task[map] run` in one string."""
    index = "" if key.map_index < 0 else f"[{key.map_index}]"
    return f"{key.dag_id}.{key.task_id}{index} {key.run_id} try {key.try_number}"


def asked(request: RequestBody) -> str:
    """Return a request in a few words, e.g. `2 x A100 >= 35 TFLOPS, 8.0 GiB each`."""
    words = f"{request.gpus} x {'|'.join(request.models) or 'any GPU'}"
    if request.min_tflops:
        words += f" {'>=' if request.strict else '~'} {request.min_tflops:g} TFLOPS"
    if request.memory_mib:
        words += f", {request.memory_mib / 1024:.1f} GiB each"
    if request.host:
        words += f" on {request.host}"
    if request.spares:
        words += f", {request.spares} spare"
    return words


def nodes(broker: Broker) -> list[NodeRow]:
    """Return all nodes with their devices."""
    now = broker.clock()
    holders = {
        device: task_name(task_key(claim))
        for held, claim in broker.repository.live_leases()
        for device in (*held.devices, *held.spares)
    }
    rows = []
    for stored in broker.mirror.stored(now):
        report = stored.report
        stale = broker.mirror.stale_reason(stored, now)
        rows.append(
            NodeRow(
                name=report.name,
                host=report.host,
                cpu_cores=report.cpu_cores,
                memory_mib=report.memory_mib,
                load=report.load,
                state="stale" if stale else "ready",
                why=stale,
                report_age_s=round((now - stored.reported_at).total_seconds(), 1),
                devices=[_device_row(d, stale, holders.get(d.id)) for d in report.devices],
            )
        )
    return rows


def _device_row(device: DeviceReport, stale: str | None, holder: str | None) -> DeviceRow:
    why = stale or unavailable_reason(device)
    state = "leased" if holder else "stale" if stale else "unavailable" if why else "free"
    return DeviceRow(
        id=device.id,
        model=device.model,
        memory_mib=device.memory_mib,
        tflops=device.tflops,
        state=state,
        why=why,
        # A stale measurement is not a measurement.
        utilisation=None if stale else device.utilisation,
        memory_used_mib=None if stale else device.memory_used_mib,
        temperature_c=None if stale else device.temperature_c,
        power_w=None if stale else device.power_w,
        simulated=device.simulated,
        holder=holder,
    )


def queue(broker: Broker) -> list[QueueRow]:
    """Return the pending claims, next first."""
    now = broker.clock()
    return [
        QueueRow(
            claim_id=row.id,
            key=task_key(row),
            asked=asked(RequestBody.model_validate(row.request)),
            value=row.value,
            run_type=RunType(row.run_type),
            submitted_at=row.submitted_at,
            waiting_s=round((now - row.submitted_at).total_seconds(), 1),
            position=row.position,
            reason_code=row.reason_code,
            reason=row.reason,
            starts_in_s=None
            if row.expected_at is None
            else max(0.0, round((row.expected_at - now).total_seconds(), 1)),
        )
        for row in broker.repository.pending()
    ]


def leases(broker: Broker) -> list[LeaseRow]:
    """Return the live leases, oldest first."""
    now = broker.clock()
    return [
        LeaseRow(
            lease_id=held.row.id,
            key=task_key(claim),
            owner=claim.owner,
            devices=[*held.devices, *held.spares],
            nodes=list(held.nodes),
            granted_at=held.row.granted_at,
            expires_in_s=round((held.row.expires_at - now).total_seconds(), 1),
            epoch=held.row.epoch,
        )
        for held, claim in broker.repository.live_leases()
    ]


def status(broker: Broker) -> Status:
    """Return the figures of the whole broker."""
    rows = nodes(broker)
    pending, live, _devices = broker.repository.counts()
    devices = [device for node in rows for device in node.devices]
    return Status(
        version=__version__,
        leader=broker.leadership.current(),
        nodes=len(rows),
        devices=len(devices),
        free=sum(device.state == "free" for device in devices),
        pending=pending,
        leases=live,
    )
