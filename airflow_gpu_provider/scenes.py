"""What `airflow gpu simulate` simulates: a fleet and tasks, before any policy.

The fleet and the present queue come from the broker by its hook, unless a fleet is described and a trace is
given; what is reserved ahead on the present fleet stays reserved. CPU load and other measurements are of this
moment only, so the simulated fleet has none. What runs how long is known from a trace; of the present queue
only what was promised is known. The next step is `what_if.compare`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from airflow_gpu_provider.broker.artifact_names import artifact_names
from airflow_gpu_provider.broker.flavors import FLAVORS, Flavor
from airflow_gpu_provider.broker.model import Device, DeviceId, Fleet, Node, NodeName
from airflow_gpu_provider.broker.reservation import Kept, Reservation
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.inventory.fleet_spec import NodeSpec, parse_fleet
from airflow_gpu_provider.inventory.simulated import CORES_PER_DEVICE, MEMORY_MIB_PER_DEVICE
from airflow_gpu_provider.rows import LeaseRow, NodeRow, QueueRow, ReservationRow
from airflow_gpu_provider.simulation.task import START, Running, Task
from airflow_gpu_provider.simulation.trace import read_trace

#: Devices that are added without saying how they sit in nodes come in nodes of at most so many.
_DEVICES_A_NODE = 8
#: What runs longer than it promised may end at any moment; it is taken to end so soon.
_OVERDUE_S = 60.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What is simulated, before any policy."""

    fleet: Fleet
    tasks: tuple[Task, ...]
    running: tuple[Running, ...] = ()
    assumed: int = 0  #: tasks whose run time nothing says, so that one was assumed
    reservations: tuple[Kept, ...] = ()  #: in virtual time, with what is kept now

    def wakes_s(self, notice: timedelta) -> Iterator[float]:
        """Yield when devices are closed or opened by reservations; ``notice`` is the installation's."""
        for each in self.reservations:
            start, end = each.reservation.starts_at, each.reservation.ends_at
            for at in (start - notice, start, end):
                yield (at - START).total_seconds()


def scene(
    hook: GpuBrokerHook,
    *,
    trace: str | None,
    fleet: str | None,
    runtime_s: float,
    flavors: Mapping[str, Flavor] = FLAVORS,
) -> Scene:
    """Return what to simulate: a trace or the present queue, on a described fleet or the present one."""
    if trace is None and fleet is not None:
        raise InvalidRequest(
            "The present queue runs on the present fleet: give --trace with --fleet, or --add to see the "
            "queue with more devices",
            reason="fleet_without_trace",
        )
    if fleet is not None:
        return Scene(described_fleet(fleet, flavors=flavors), read_trace(Path(trace or "")))
    there, now = fleet_of_nodes(hook.nodes()), datetime.now(timezone.utc)
    reserved = tuple(_reserved(row, now) for row in hook.reservations())
    if trace is not None:
        return Scene(there, read_trace(Path(trace)), reservations=reserved)
    found = present(there, hook.queue(), hook.leases(), now, runtime_s=runtime_s)
    return replace(found, reservations=reserved)


def _reserved(row: ReservationRow, now: datetime) -> Kept:
    devices = frozenset(map(DeviceId, row.devices))
    reservation = Reservation(
        row.id,
        START + (row.starts_at - now),
        START + (row.ends_at - now),
        by=row.by,
        team=row.team,
        dag_id=row.dag_id,
        devices=devices,
        number=0 if devices else row.number,
        model=row.model,
    )
    return Kept(reservation, frozenset(map(DeviceId, row.kept)))


def fleet_of_nodes(rows: Sequence[NodeRow]) -> Fleet:
    """Return the broker's fleet; what is drained, stale or suspect stays so."""
    return Fleet(
        tuple(
            Node(
                name=NodeName(row.name),
                host=row.host,
                cpu_cores=row.cpu_cores,
                memory_mib=row.memory_mib,
                unavailable=None if row.state == "ready" else row.why or row.state,
                artifacts=artifact_names(row.artifacts),
                devices=tuple(
                    Device(
                        id=DeviceId(device.id),
                        node=NodeName(row.name),
                        model=device.model,
                        memory_mib=device.memory_mib,
                        tflops=device.tflops,
                        unavailable=device.why,
                        simulated=device.simulated,
                    )
                    for device in row.devices
                ),
            )
            for row in rows
        )
    )


def described_fleet(text: str, *, base_name: str = "node", flavors: Mapping[str, Flavor] = FLAVORS) -> Fleet:
    """Return the fleet of a text such as ``64x(8xA100-80GB)``, a host for each node."""
    return Fleet(tuple(_node(spec) for spec in parse_fleet(text, base_name=base_name, flavors=flavors)))


def enlarged(fleet: Fleet, text: str, flavors: Mapping[str, Flavor] = FLAVORS) -> Fleet:
    """Return the fleet with more devices; "16xA100" comes in nodes of at most 8."""
    taken = {node.name for node in fleet.nodes}
    specs = [part for spec in parse_fleet(text, base_name="added", flavors=flavors) for part in _split(spec)]
    nodes = []
    for spec in specs:
        name, number = spec.name, 2
        while name in taken:
            name, number = f"{spec.name}-{number}", number + 1
        taken.add(NodeName(name))
        nodes.append(_node(replace(spec, name=name)))
    return Fleet((*fleet.nodes, *nodes))


def _split(spec: NodeSpec) -> list[NodeSpec]:
    if len(spec.devices) <= _DEVICES_A_NODE:
        return [spec]
    starts = range(0, len(spec.devices), _DEVICES_A_NODE)
    return [
        NodeSpec(f"{spec.name}-{number}", spec.devices[start : start + _DEVICES_A_NODE])
        for number, start in enumerate(starts, start=1)
    ]


def _node(spec: NodeSpec) -> Node:
    name = NodeName(spec.name)
    devices = tuple(
        Device(DeviceId(f"{name}/{index}"), name, each.model, each.memory_mib, each.tflops, simulated=True)
        for index, each in enumerate(spec.devices)
    )
    size = len(devices)
    return Node(name, spec.name, CORES_PER_DEVICE * size, MEMORY_MIB_PER_DEVICE * size, devices)


def present(
    fleet: Fleet, queue: Sequence[QueueRow], leases: Sequence[LeaseRow], now: datetime, *, runtime_s: float
) -> Scene:
    """Return the claims that wait and the leases that live; one without a promise runs ``runtime_s``."""
    there = {device.id for node in fleet.nodes for device in node.devices}
    held = [(row, tuple(DeviceId(each) for each in row.devices if each in there)) for row in leases]
    tasks = tuple(_waiting(row, runtime_s) for row in queue)
    running = tuple(_running(row, devices, runtime_s, now) for row, devices in held if devices)
    every = [*tasks, *(each.task for each in running)]
    return Scene(fleet, tasks, running, sum(task.request.max_runtime_s is None for task in every))


def _waiting(row: QueueRow, runtime_s: float) -> Task:
    request = row.request.to_request()
    return Task(
        id=row.claim_id,
        arrives_s=-row.waiting_s,
        request=request,
        runtime_s=request.max_runtime_s or runtime_s,
        value=row.value,
        run_type=row.run_type,
        completes=row.completes,
        team=row.team,
        dag_id=row.key.dag_id,
    )


def _running(row: LeaseRow, devices: tuple[DeviceId, ...], runtime_s: float, now: datetime) -> Running:
    request = row.request.to_request()
    age_s = max(0.0, (now - row.granted_at).total_seconds())
    expected_s = request.max_runtime_s or runtime_s
    task = Task(
        id=row.lease_id,
        arrives_s=-age_s,
        request=request,
        runtime_s=expected_s,
        team=row.team,
        dag_id=row.key.dag_id,
    )
    return Running(task, devices, -age_s, max(_OVERDUE_S, expected_s - age_s))
