"""How long a decision takes as the fleet grows: CPU time of the broker's engine for one event.

Nodes of 8 GPUs of three models, leased to 70 %, in steady state: one lease ends, one claim comes, and a turn
decides. That is one decision, timed as a whole. Claims are a fixed mix of whole devices, shares and gangs of
2, 4 and 8, some bound to a model, with cores and memory. The sizes take turns in one run, since a machine
that others use is slow at times; what is timed is the CPU time of this thread.

    python -m tests.benchmarks.decision_time --nodes 100,1000,10000 --json
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone

import numpy as np

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import (
    Claim,
    ClaimId,
    CyclePolicy,
    Device,
    DeviceId,
    Fleet,
    GpuRequest,
    Lease,
    LeaseId,
    Node,
    NodeName,
    Placement,
)

GPUS = 8
FULL = 0.7
#: Model, TFLOPS, memory, and how many of ten nodes have it.
MODELS = (("V100", 15.0, 32_768, 3), ("A100", 35.0, 81_920, 5), ("H100", 67.0, 81_920, 2))
#: Of a hundred claims: gpus, milli, cores, GiB of host memory, models.
CLAIMS = (
    (25, 1, 1000, 8, 32, ()),
    (15, 1, 1000, 4, 16, ("V100",)),
    (15, 1, 1000, 8, 64, ("A100", "H100")),
    (10, 1, 500, 4, 16, ()),
    (10, 1, 250, 2, 8, ("V100", "A100")),
    (10, 2, 1000, 16, 64, ()),
    (5, 2, 1000, 16, 128, ("A100",)),
    (6, 4, 1000, 32, 128, ("A100", "H100")),
    (4, 8, 1000, 64, 256, ()),
)
NOW = datetime(2026, 3, 1, tzinfo=timezone.utc)
TTL = timedelta(days=1)


def fleet_of(nodes: int) -> Fleet:
    """Return the nodes, the models spread evenly."""
    kinds = [kind for kind in MODELS for _ in range(kind[3])]
    made = []
    for number in range(nodes):
        model, speed, memory, _ = kinds[number % len(kinds)]
        name = NodeName(f"node-{number:05}")
        devices = tuple(
            Device(DeviceId(f"{name}/{index}"), name, model, memory, speed) for index in range(GPUS)
        )
        made.append(Node(name, name, 96, 768 * 1024, devices))
    return Fleet(tuple(made))


class Steady:
    """A fleet on which leases end as claims come."""

    def __init__(self, nodes: int, seed: int) -> None:
        self._chance = random.Random(seed)
        self._requests = [
            GpuRequest(gpus, frozenset(models), milli=milli, cpu_cores=cores, host_memory_mib=gib * 1024)
            for times, gpus, milli, cores, gib, models in CLAIMS
            for _ in range(times)
        ]
        self._held: list[Lease] = []
        self._claims: dict[ClaimId, Claim] = {}
        self._number = 0
        self._used = 0
        self._full = int(FULL * 1000 * GPUS * nodes)
        self.engine = Engine(CyclePolicy(), fleet_of(nodes))
        self.times_us: list[float] = []
        self.without_placement = 0
        while self._used < self._full:
            self.engine.submit(self._claim())
            self._note(self.engine.turn(NOW).placements)

    def decide(self) -> None:
        """Time one decision; then, untimed, bring the fleet back to the use it should have."""
        ended, claim = self._end(), self._claim()
        began = time.thread_time_ns()
        self.engine.end(ended)
        self.engine.submit(claim)
        placements = self.engine.turn(NOW).placements
        self.times_us.append((time.thread_time_ns() - began) / 1000)
        self.without_placement += not placements
        self._note(placements)
        while self._used > self._full:
            self.engine.end(self._end())
        while self._used < self._full - 8 * 1000:
            self.engine.submit(self._claim())
            self._note(self.engine.turn(NOW).placements)

    def _claim(self) -> Claim:
        self._number += 1
        claim = Claim(ClaimId(f"c{self._number}"), self._chance.choice(self._requests), NOW)
        self._claims[claim.id] = claim
        return claim

    def _end(self) -> LeaseId:
        index = self._chance.randrange(len(self._held))
        self._held[index], self._held[-1] = self._held[-1], self._held[index]
        lease = self._held.pop()
        self._used -= lease.request.gpus * lease.request.milli
        return lease.id

    def _note(self, placements: Iterable[Placement]) -> None:
        for placement in placements:
            request = self._claims.pop(placement.claim_id).request
            lease = Lease(
                LeaseId(placement.claim_id), placement.claim_id, placement.devices, request, NOW, NOW + TTL
            )
            self.engine.granted(placement, lease)
            self._held.append(lease)
            self._used += request.gpus * request.milli


def measure(sizes: list[int], decisions: int, seed: int) -> dict[str, object]:
    """Return the figures of all sizes, which take turns of a hundred decisions."""
    runs = {size: Steady(size, seed) for size in sizes}
    gc.collect()
    gc.freeze()  # the fleets of this benchmark are not the broker's garbage
    for round_number in range(decisions // 100 + 5):
        for run in runs.values():
            for _ in range(100):
                run.decide()
            if round_number == 4:  # until then the classes see the shapes for the first time
                run.times_us.clear()
    p50 = {size: float(np.percentile(run.times_us, 50)) for size, run in runs.items()}
    least = p50[sizes[0]]
    return {
        "decisions": {str(size): len(run.times_us) for size, run in runs.items()},
        "without_placement": {str(size): run.without_placement for size, run in runs.items()},
        "p50_us": {str(size): round(p50[size], 1) for size in sizes},
        "p99_us": {str(size): round(float(np.percentile(run.times_us, 99)), 1) for size, run in runs.items()},
        "mean_us": {str(size): round(float(np.mean(run.times_us)), 1) for size, run in runs.items()},
    } | {f"growth_{size}_pct": round(100 * (p50[size] / least - 1), 1) for size in sizes[1:]}


def main() -> None:
    """Read the arguments and print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", default="100,1000,10000")
    parser.add_argument("--decisions", type=int, default=5000, help="of each size")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print only the JSON object (always so)")
    args = parser.parse_args()
    sizes = [int(each) for each in args.nodes.split(",")]
    print(json.dumps(measure(sizes, args.decisions, args.seed)))


if __name__ == "__main__":
    main()
