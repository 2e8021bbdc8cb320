"""Average completion time on a mixed fleet: measured throughputs against FIFO, pools and TFLOPS.

36 K80, 36 P100 and 36 V100, and jobs as in Gavel's study (OSDI'20): 26 kinds of training with their measured
steps a second on each model, drawn evenly; 70 % on one GPU, 10 % on 2, 15 % on 4, 5 % on 8; on a V100 80 %
run 10^1.5 to 10^3 minutes and 20 % 10^3 to 10^4, evenly in the exponent; Poisson arrivals. A job has a fixed
number of steps, so where it runs decides how long. A load of 1 arrives as fast as the fleet works, if each
model does its equal share of every kind. All policies get the same jobs on the virtual clock of
`airflow_gpu_provider.simulation`; kinds that do not run on every model (0 steps a second) are left out, and
so are gangs over nodes that the file measures apart. No job asks for a model or promises when it ends.

    python -m tests.benchmarks.jct --throughputs simulation_throughputs.json --json

``measured`` is the broker that was told the throughputs of the file beforehand, ``learning`` the one that
learns them from finished runs, beginning with nothing, ``ours`` the one that knows ratings only.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from airflow_gpu_provider.broker.flavors import canonical_model
from airflow_gpu_provider.broker.model import CyclePolicy, Fleet, GpuRequest
from airflow_gpu_provider.broker.throughput import Throughput, ThroughputTable
from airflow_gpu_provider.scenes import described_fleet
from airflow_gpu_provider.simulation.policies import POLICIES, Ours
from airflow_gpu_provider.simulation.report import Report, report
from airflow_gpu_provider.simulation.simulator import Scheduler, simulate
from airflow_gpu_provider.simulation.task import START, Task

FLEET = "k:9x(4xK80);p:9x(4xP100);v:9x(4xV100)"
MODELS = ("k80", "p100", "v100")
SIZES = ((1, 0.70), (2, 0.10), (4, 0.15), (8, 0.05))
#: Runs of each kind on each model that the broker knows beforehand; so many outweigh the ratings.
KNOWN_RUNS = 32
POLICY_NAMES = ("measured", "learning", "ours", "tflops", "pools", "fifo")


@dataclass(frozen=True)
class Kind:
    """A kind of training on a number of GPUs, and its steps a second by model."""

    name: str
    gpus: int
    steps_per_s: dict[str, float]

    @property
    def task_class(self) -> str:
        return f"{self.name} on {self.gpus}"


def read_kinds(path: Path) -> list[Kind]:
    """Return what runs on all models."""
    measured = json.loads(path.read_text())
    kinds = []
    for key in measured["v100"]:
        name, gpus = ast.literal_eval(key)
        steps = {canonical_model(model): measured[model].get(key, {}).get("null", 0.0) for model in MODELS}
        if min(steps.values()) > 0 and gpus in dict(SIZES):
            kinds.append(Kind(name, gpus, steps))
    return kinds


def jobs_of(kinds: Sequence[Kind], number: int, load: float, seed: int) -> list[Task]:
    """Return the jobs."""
    chance = random.Random(seed)
    drawn = list(_drawn(kinds, number, chance))
    # What a device of each model does in a second, of which the mean is the speed of the fleet.
    work_s = sum(kind.gpus / fmean(1 / each for each in runtimes.values()) for kind, runtimes in drawn)
    gpus = sum(len(node.devices) for node in described_fleet(FLEET).nodes)
    apart_s = work_s / gpus / load / number
    jobs, at = [], 0.0
    for index, (kind, runtimes) in enumerate(drawn):
        at += chance.expovariate(1 / apart_s)
        request = GpuRequest(gpus=kind.gpus, task_class=kind.task_class)
        jobs.append(Task(f"job-{index:05d}", at, request, runtime_by_model=runtimes, dag_id=kind.name))
    return jobs


def _drawn(
    kinds: Sequence[Kind], number: int, chance: random.Random
) -> Iterator[tuple[Kind, dict[str, float]]]:
    names = sorted({kind.name for kind in kinds if kind.gpus == 1})
    by_key = {(kind.name, kind.gpus): kind for kind in kinds}
    for _ in range(number):
        (size,) = chance.choices([size for size, _ in SIZES], [share for _, share in SIZES])
        kind = by_key.get((chance.choice(names), size))
        while kind is None:  # not every kind is measured on so many
            kind = by_key.get((chance.choice(names), size))
        power = chance.uniform(1.5, 3) if chance.random() < 0.8 else chance.uniform(3, 4)
        steps = 60 * 10**power * kind.steps_per_s["V100"]
        yield kind, {model: steps / speed for model, speed in kind.steps_per_s.items()}


def informed(fleet: Fleet, kinds: Sequence[Kind]) -> Scheduler:
    """Return the broker that knows the throughputs of the file, for each GPU."""
    runs = [
        Throughput(kind.task_class, model, speed / kind.gpus, START)
        for kind in kinds
        for model, speed in kind.steps_per_s.items()
        for _ in range(KNOWN_RUNS)
    ]
    ours = Ours(fleet, CyclePolicy())
    ours.engine.learn(ThroughputTable(runs).learned(START))
    return ours


def compare(kinds: Sequence[Kind], number: int, load: float, seed: int) -> dict[str, Report]:
    """Return the report of each policy on the same jobs."""
    fleet = described_fleet(FLEET)
    jobs = jobs_of(kinds, number, load, seed)
    found = {}
    for name in POLICY_NAMES:
        known = {"learning": "measured"}.get(name, name)
        scheduler = informed(fleet, kinds) if name == "measured" else POLICIES[known].make(fleet, jobs)
        found[name] = report(simulate(fleet, jobs, scheduler), fleet)
    return found


def main() -> None:
    """Read the arguments, print a line a run and one JSON object at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--throughputs", type=Path, required=True, help="simulation_throughputs.json of Gavel"
    )
    parser.add_argument("--loads", default="0.5,0.7,0.9,1.1")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    args = parser.parse_args()
    kinds = read_kinds(args.throughputs)
    rows = []
    for load in map(float, args.loads.split(",")):
        found = []
        for seed in map(int, args.seeds.split(",")):
            found.append(compare(kinds, args.jobs, load, seed))
            if not args.json:
                print(f"load {load} seed {seed}", *found[-1].items(), sep="\n  ", file=sys.stderr)
        hours = {
            name: round(fmean(each[name].completion_mean_s or 0.0 for each in found) / 3600, 2)
            for name in POLICY_NAMES
        }
        rows.append(
            {
                "load": load,
                "completion_mean_h": hours,
                "measured_shorter_pct": {
                    name: round(100 * (1 - hours["measured"] / hours[name]), 1)
                    for name in POLICY_NAMES
                    if name != "measured"
                },
                "unfinished": {name: sum(each[name].failed for each in found) for name in POLICY_NAMES},
            }
        )
    print(json.dumps({"jobs": args.jobs, "seeds": args.seeds, "kinds": len(kinds), "loads": rows}))


if __name__ == "__main__":
    main()
