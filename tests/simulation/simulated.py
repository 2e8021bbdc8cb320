"""Small fleets and tasks for the tests of the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow_gpu_provider.broker.flavors import FLAVORS
from airflow_gpu_provider.broker.model import Device, DeviceId, Fleet, GpuRequest, Node, NodeName
from airflow_gpu_provider.simulation.policies import POLICIES
from airflow_gpu_provider.simulation.simulator import Outcome, Run, simulate
from airflow_gpu_provider.simulation.task import Running, Task


def fleet(nodes: Mapping[str, tuple[str, int]]) -> Fleet:
    """Return nodes by name: model and number of devices, which are called name/0, name/1, ..."""
    return Fleet(
        tuple(
            Node(
                NodeName(name),
                name,
                64.0,
                1_000_000,
                tuple(
                    Device(
                        DeviceId(f"{name}/{index}"),
                        NodeName(name),
                        model,
                        FLAVORS[model].memory_mib,
                        FLAVORS[model].rating,
                    )
                    for index in range(gpus)
                ),
            )
            for name, (model, gpus) in nodes.items()
        )
    )


def task(name: str, at: float, runs: float | Mapping[str, float], gpus: int = 1, **more: Any) -> Task:
    """Return a task; what is of its request goes there."""
    of_request = {
        key: more.pop(key)
        for key in ("models", "milli", "memory_mib", "max_runtime_s", "spares", "task_class", "node_labels")
        if key in more
    }
    times: dict[str, Any] = (
        {"runtime_s": runs} if isinstance(runs, (int, float)) else {"runtime_by_model": runs}
    )
    return Task(name, at, GpuRequest(gpus=gpus, **of_request), **times, **more)


def run(policy: str, on: Fleet, tasks: Sequence[Task], running: Sequence[Running] = ()) -> Run:
    """Return the run of a policy."""
    return simulate(on, tasks, POLICIES[policy].make(on, tasks), running)


def by_name(result: Run) -> dict[str, Outcome]:
    """Return the outcomes by the names of the tasks."""
    return {outcome.task.id: outcome for outcome in result.outcomes}
