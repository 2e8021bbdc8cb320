"""How many tasks are delayed or fail because of others: the broker against static pools a model.

The same tasks, drawn by seed, run on the virtual clock of `airflow_gpu_provider.simulation` through the
broker's own core and through pools. A task counts when it *fails* (its ``queue_timeout`` is over) or is
*delayed*: it waited more than max(60 s, a tenth of its shortest run time) longer than alone on the same
fleet, where each of them starts at once. `simulation.policies` says what the pools are: each kind
of task of each DAG is bound to one, such that all pools get equal work, as if its author knew the future.

    python -m tests.benchmarks.contention --json

The fleet: 64 A100, 48 V100, 32 L4 and 16 H100. The tasks: steps of 3D reconstruction in bursts, one burst a
catalogue, fine-tuning and training gangs of 2, 4 and 8, evaluations and inference by day and by night;
some accept one model only, many promise a ``max_runtime``, few of them tightly. A load of 0.8 means: what
arrives in the two days would keep 80 % of the fleet busy if each model did its equal share. Arrivals peak at
noon at 1.5 times their mean. ``reduction_pct`` is over the loads up to 0.8; above, the fleet is too small for
its noons, whoever shares it out, and ``reduction_pct_all_loads`` says what is left then. The comparison with
``tflops`` (one queue, all that fits starts) shows what the protection of gangs and of old tasks costs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from airflow_gpu_provider.broker.flavors import FLAVORS
from airflow_gpu_provider.broker.model import Device, DeviceId, Fleet, GpuRequest, Node, NodeName, RunType
from airflow_gpu_provider.simulation.policies import POLICIES
from airflow_gpu_provider.simulation.report import Report, report
from airflow_gpu_provider.simulation.simulator import simulate
from airflow_gpu_provider.simulation.task import Task

HORIZON_S = 48 * 3600.0
#: model: nodes, devices of each
FLEET = {"H100": (2, 8), "A100": (8, 8), "V100": (6, 8), "L4": (4, 8)}
#: What a task that wants memory only runs at, relative to an A100; a class's own factor is drawn around it.
SPEED = {"H100": 2.0, "A100": 1.0, "V100": 0.5, "L4": 0.45}
#: Promises are round, as people write them.
PROMISES_S = (900.0, 1800.0, 3600.0, 7200.0, 14_400.0, 28_800.0, 57_600.0, 115_200.0)


@dataclass(frozen=True)
class Kind:
    """A kind of task: how much of all work it is, and what it asks; run times are those on an A100."""

    name: str
    share: float
    request: GpuRequest
    median_s: float
    spread: float
    burst: int  #: tasks that come together
    value: float = 0.0
    promises: float = 0.7  #: share of DAGs that promise a max_runtime
    queue_timeout_s: float | None = None
    run_type: RunType = RunType.LIVE


KINDS = (
    Kind("reconstruct", 0.20, GpuRequest(memory_mib=12_000), 900, 0.5, 40, value=10),
    Kind("reconstruct-big", 0.08, GpuRequest(memory_mib=30_000), 1800, 0.5, 12, value=10),
    Kind("refresh", 0.12, GpuRequest(memory_mib=12_000), 900, 0.5, 80, run_type=RunType.BACKFILL),
    Kind("finetune-1", 0.10, GpuRequest(memory_mib=16_000, models=frozenset({"A100", "V100"})), 5400, 0.9, 1),
    Kind("finetune-2", 0.08, GpuRequest(gpus=2, memory_mib=30_000), 7200, 0.8, 1),
    Kind("finetune-4", 0.12, GpuRequest(gpus=4, models=frozenset({"A100", "H100"})), 9000, 0.8, 1),
    Kind("train-8", 0.12, GpuRequest(gpus=8, models=frozenset({"A100", "H100"})), 14_400, 0.7, 1, value=20),
    Kind("train-v100", 0.06, GpuRequest(gpus=4, models=frozenset({"V100"})), 5400, 0.7, 1),
    Kind("evaluate", 0.05, GpuRequest(memory_mib=14_000), 600, 0.8, 6, value=5),
    Kind("infer", 0.07, GpuRequest(memory_mib=8_000), 300, 0.6, 10, value=30, queue_timeout_s=3600),
)
DAGS_A_KIND = 3
#: The highest load that counts for the one figure.
SUSTAINABLE = 0.8


def fleet_of(nodes: dict[str, tuple[int, int]]) -> Fleet:
    """Return the nodes."""
    made = []
    for model, (count, gpus) in nodes.items():
        memory_mib, rating = FLAVORS[model].memory_mib, FLAVORS[model].rating
        if model == "V100":
            memory_mib = 32_768
        for number in range(count):
            name = NodeName(f"{model.lower()}-{number}")
            devices = tuple(
                Device(DeviceId(f"{name}/{index}"), name, model, memory_mib, rating) for index in range(gpus)
            )
            made.append(Node(name, name, 16.0 * gpus, 131_072 * gpus, devices))
    return Fleet(tuple(made))


def tasks_of(fleet: Fleet, load: float, seed: int) -> list[Task]:
    """Return the tasks that arrive in the horizon."""
    chance = random.Random(seed)
    budget_s = load * HORIZON_S * sum(SPEED[d.model] for node in fleet.nodes for d in node.devices)
    tasks: list[Task] = []
    for kind in KINDS:
        left = kind.share * budget_s
        dags = [_Dag(kind, number, chance) for number in range(DAGS_A_KIND)]
        while left > 0:
            dag = chance.choice(dags)
            at = _arrival(chance)
            size = 1 if kind.burst == 1 else max(1, round(chance.lognormvariate(math.log(kind.burst), 0.5)))
            for _ in range(size):
                task = dag.task(chance, at + chance.uniform(0, 30), f"{kind.name}-{len(tasks)}")
                tasks.append(task)
                left -= kind.request.gpus * task.runtime_on(["A100"])
    return tasks


def _arrival(chance: random.Random) -> float:
    """Return a moment of the horizon: by day three times as many as by night."""
    while True:
        at = chance.uniform(0, HORIZON_S)
        if chance.random() < 0.5 - 0.25 * math.cos(2 * math.pi * at / 86_400) or chance.random() < 0.25:
            return at


class _Dag:
    """Tasks of one kind, alike in speed by model, promise and value."""

    def __init__(self, kind: Kind, number: int, chance: random.Random) -> None:
        self._kind = kind
        self._name = f"{kind.name}-{number}"
        self._speed = {model: speed * chance.lognormvariate(0, 0.2) for model, speed in SPEED.items()}
        self._speed["A100"] = 1.0
        self._promises = chance.random() < kind.promises
        self._value = kind.value + chance.choice((0, 0, 5))

    def task(self, chance: random.Random, at: float, name: str) -> Task:
        """Return a task that arrives at that moment."""
        kind = self._kind
        run_s = min(kind.median_s * 8, chance.lognormvariate(math.log(kind.median_s), kind.spread))
        runtimes = {model: run_s / speed for model, speed in self._speed.items()}
        request = replace(kind.request, task_class=self._name)
        if self._promises:
            # A promise must hold on the slowest device that the task may get.
            slowest = max(runtimes[model] for model in kind.request.models or runtimes)
            margin = chance.uniform(1.1, 2.5)
            promise = next((each for each in PROMISES_S if each >= slowest * margin), PROMISES_S[-1])
            request = replace(request, max_runtime_s=promise)
        return Task(
            id=name,
            arrives_s=at,
            request=request,
            runtime_by_model=runtimes,
            value=self._value,
            run_type=kind.run_type,
            dag_id=self._name,
            queue_timeout_s=kind.queue_timeout_s,
        )


def compare(load: float, seed: int, names: Sequence[str]) -> dict[str, Report]:
    """Return the report of each policy on the same tasks."""
    fleet = fleet_of(FLEET)
    tasks = tasks_of(fleet, load, seed)
    return {name: report(simulate(fleet, tasks, POLICIES[name].make(fleet, tasks)), fleet) for name in names}


def reduction_pct(harmed: dict[str, int], others: str) -> float:
    """Return by how much fewer ours are."""
    return round(100 * (1 - harmed["ours"] / harmed[others]), 1) if harmed.get(others) else 0.0


def main() -> None:
    """Read the arguments, print a line a run and one JSON object at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loads", default="0.5,0.65,0.8,0.95")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument(
        "--policies", default="ours,measured,pools,fifo,tflops", help="ours and pools at least"
    )
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    args = parser.parse_args()
    names = args.policies.split(",")
    rows = []
    for load in map(float, args.loads.split(",")):
        found = []
        for seed in map(int, args.seeds.split(",")):
            found.append(compare(load, seed, names))
            if not args.json:
                print(f"load {load} seed {seed}", *found[-1].items(), sep="\n  ", file=sys.stderr)
        rows.append(_row(load, found))
    summary = {
        "reduction_pct": _overall([row for row in rows if row["load"] <= SUSTAINABLE]),
        "reduction_pct_all_loads": _overall(rows),
        "reduction_pct_least": min(row["reduction_pct"] for row in rows),
        "seeds": args.seeds,
        "loads": rows,
    }
    print(json.dumps(summary))


def _overall(rows: list[dict[str, Any]]) -> float:
    names = rows[0]["delayed_or_failed"] if rows else ()
    return reduction_pct(
        {name: sum(row["delayed_or_failed"][name] for row in rows) for name in names}, "pools"
    )


def _row(load: float, found: list[dict[str, Report]]) -> dict[str, Any]:
    def total(figure: str) -> dict[str, int]:
        return {name: sum(getattr(each[name], figure) for each in found) for name in found[0]}

    return {
        "load": load,
        "tasks": sum(each["ours"].tasks for each in found),
        "reduction_pct": reduction_pct(total("delayed_or_failed"), "pools"),
        "delayed_or_failed": total("delayed_or_failed"),
        "failed": total("failed"),
        "wait_mean_s": {
            name: round(fmean(each[name].wait_mean_s or 0 for each in found)) for name in found[0]
        },
        "completion_mean_s": {
            name: round(fmean(each[name].completion_mean_s or 0 for each in found)) for name in found[0]
        },
    }


if __name__ == "__main__":
    main()
