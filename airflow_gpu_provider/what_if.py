"""`airflow gpu simulate`: gather a fleet and tasks, run them by each policy, show the figures.

The fleet and the present queue come from the broker by its hook, unless a fleet is described and a trace is
given. CPU load and other measurements are of this moment only, so the simulated fleet has none. What runs
how long is known from a trace; of the present queue only what was promised is known. The core of it is the
package `simulation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from airflow_gpu_provider.broker.artifact_names import artifact_names
from airflow_gpu_provider.broker.flavors import tflops
from airflow_gpu_provider.broker.model import Device, DeviceId, Fleet, Node, NodeName
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.inventory.fleet_spec import NodeSpec, parse_fleet
from airflow_gpu_provider.inventory.simulated import CORES_PER_DEVICE, MEMORY_MIB_PER_DEVICE
from airflow_gpu_provider.rows import LeaseRow, NodeRow, QueueRow
from airflow_gpu_provider.simulation import plot
from airflow_gpu_provider.simulation.policies import chosen
from airflow_gpu_provider.simulation.report import Report, report
from airflow_gpu_provider.simulation.simulator import Run, simulate
from airflow_gpu_provider.simulation.task import Running, Task
from airflow_gpu_provider.simulation.trace import read_trace

#: Devices that are added without saying how they sit in nodes come in nodes of at most so many.
_DEVICES_A_NODE = 8
#: What runs longer than it promised may end at any moment; it is taken to end so soon.
_OVERDUE_S = 60.0
_AS_IS = "as is"


@dataclass(frozen=True, slots=True)
class Scene:
    """What is simulated, before any policy."""

    fleet: Fleet
    tasks: tuple[Task, ...]
    running: tuple[Running, ...] = ()
    assumed: int = 0  #: tasks whose run time nothing says, so that one was assumed


def scene(hook: GpuBrokerHook, *, trace: str | None, fleet: str | None, runtime_s: float) -> Scene:
    """Return what to simulate: a trace or the present queue, on a described fleet or the present one."""
    if trace is None and fleet is not None:
        raise InvalidRequest(
            "The present queue runs on the present fleet: give --trace with --fleet, or --add to see the "
            "queue with more devices",
            reason="fleet_without_trace",
        )
    there = fleet_of_nodes(hook.nodes()) if fleet is None else described_fleet(fleet)
    if trace is not None:
        return Scene(there, read_trace(Path(trace)))
    return present(there, hook.queue(), hook.leases(), datetime.now(timezone.utc), runtime_s=runtime_s)


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


def described_fleet(text: str, *, base_name: str = "node") -> Fleet:
    """Return the fleet of a text such as ``64x(8xA100-80GB)``, a host for each node."""
    return Fleet(tuple(_node(spec) for spec in parse_fleet(text, base_name=base_name)))


def enlarged(fleet: Fleet, text: str) -> Fleet:
    """Return the fleet with more devices; "16xA100" comes in nodes of at most 8."""
    taken = {node.name for node in fleet.nodes}
    specs = [part for spec in parse_fleet(text, base_name="added") for part in _split(spec)]
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
        Device(
            DeviceId(f"{name}/{index}"), name, each.model, each.memory_mib, tflops(each.model), simulated=True
        )
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
        dag_id=row.key.dag_id,
    )
    return Running(task, devices, -age_s, max(_OVERDUE_S, expected_s - age_s))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One policy on one fleet."""

    policy: str
    fleet: str
    run: Run
    report: Report

    @property
    def title(self) -> str:
        """Its name in a plot."""
        return self.policy if self.fleet == _AS_IS else f"{self.policy}, {self.fleet}"


def compare(
    what: Scene, policies: str, *, add: str | None = None, dag_id: str | None = None
) -> tuple[Comparison, ...]:
    """Return the figures of each policy on the fleet, and on the fleet with what is added.

    ``policies`` are names such as "ours,fifo". With ``dag_id`` the figures are of the tasks of one DAG; all
    others run as well.
    """
    names = chosen(policies)
    every = [*what.tasks, *(each.task for each in what.running)]
    if not every:
        raise InvalidRequest(
            "Nothing waits and nothing runs: give --trace to simulate tasks to come",
            reason="nothing_to_simulate",
        )
    dags = {task.dag_id or "" for task in every}
    if dag_id is not None and dag_id not in dags:
        raise InvalidRequest(
            f"No task is of DAG {dag_id!r}; there are {', '.join(sorted(filter(None, dags))[:10]) or 'none'}",
            reason="unknown_dag",
        )
    fleets = {_AS_IS: what.fleet}
    if add is not None:
        fleets[f"+ {add}"] = enlarged(what.fleet, add)
    found = []
    for policy in names:
        for name, fleet in fleets.items():
            run = simulate(fleet, what.tasks, policy.make(fleet, what.tasks), what.running)
            figures = report(run, fleet, lambda task: dag_id is None or task.dag_id == dag_id)
            found.append(Comparison(policy.name, name, run, figures))
    return tuple(found)


def rows_for_programs(comparisons: Sequence[Comparison]) -> list[dict[str, object]]:
    """Return the figures, times in seconds; None = no task of that sort."""
    return [
        {
            "policy": each.policy,
            "fleet": each.fleet,
            **{name: _rounded(value) for name, value in asdict(each.report).items()},
        }
        for each in comparisons
    ]


def rows_for_people(comparisons: Sequence[Comparison]) -> list[dict[str, object]]:
    """Return the figures as a table for people."""
    return [_row(each.policy, each.fleet, each.report) for each in comparisons]


def _row(policy: str, fleet: str, figures: Report) -> dict[str, object]:
    return {
        "policy": policy,
        "fleet": fleet,
        "done in": length(figures.makespan_s),
        "finished": figures.finished,
        "failed": figures.failed,
        "delayed": figures.delayed,
        "wait p50": length(figures.wait_p50_s),
        "wait p95": length(figures.wait_p95_s),
        "mean wait": length(figures.wait_mean_s),
        "mean completion": length(figures.completion_mean_s),
        "leased": f"{figures.utilisation:.0%}",
    }


def length(seconds: float | None) -> str:
    """Return a length of time for people: "2d 3h", "1h 05m", "45 s"."""
    if seconds is None:
        return "N/A"
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes = round(seconds / 60)
    days, hours = divmod(minutes // 60, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes % 60:02d}m" if hours else f"{minutes}m"


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def check_plot(path: str | None) -> None:
    """Refuse a plot that could not be saved, before anything is simulated."""
    if path is not None:
        plot.check(Path(path))


def save_plot(path: str | None, comparisons: Sequence[Comparison]) -> None:
    """Save the runs as a plot where one is asked for."""
    if path is not None:
        runs = {each.title: each.run for each in comparisons}
        tasks = comparisons[0].report.tasks
        plot.save(Path(path), runs, rows_for_people(comparisons), title=f"{tasks} tasks, simulated")
