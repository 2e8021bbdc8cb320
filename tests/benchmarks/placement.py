"""How much of a real fleet the broker's placement fills: replay of Alibaba's openb GPU trace.

The protocol is that of "Beware of Fragmentation" (ATC'23): the trace's pods in seeded random order, then
samples of them until 130 % of the fleet's GPU capacity has arrived; nothing departs, what does not fit is
dropped. The score is allocated GPU over capacity. Each pod is submitted to the broker's own `Engine`, as by
the server; it learns the mix of requests from the stream and never reads ahead. The books here, not the
policy, check every constraint.

    python -m tests.benchmarks.placement --data DIR --trace default --seeds 101,102,103 --json

DIR holds ``openb_node_list_gpu_node.csv`` and ``openb_pod_list_NAME.csv`` of cluster-trace-gpu-v2023. Pods
without a GPU are no claims: the benchmark puts them, as other tenants, where they strand the least GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, median

import numpy as np

from airflow_gpu_provider.broker.capacity import Part
from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.layout import millicores
from airflow_gpu_provider.broker.model import (
    WHOLE_DEVICE,
    Claim,
    ClaimId,
    CyclePolicy,
    Device,
    DeviceId,
    Fleet,
    GpuRequest,
    Node,
    NodeName,
)

ARRIVED_AT_END = 1.3
NOW = datetime(2023, 1, 1, tzinfo=timezone.utc)


def read_fleet(folder: Path) -> Fleet:
    """Return the nodes of the trace. It tells no speed or size of GPUs: they differ by model only."""
    nodes = []
    with (folder / "openb_node_list_gpu_node.csv").open() as file:
        for row in csv.DictReader(file):
            name = NodeName(row["sn"])
            devices = tuple(
                Device(DeviceId(f"{name}/{index}"), name, row["model"], 0, 0.0)
                for index in range(int(row["gpu"]))
            )
            nodes.append(Node(name, name, int(row["cpu_milli"]) / 1000, int(row["memory_mib"]), devices))
    return Fleet(tuple(nodes))


def read_requests(folder: Path, trace: str) -> list[GpuRequest]:
    """Return the pods of the trace as requests; those without a GPU have ``gpus=0``."""
    with (folder / f"openb_pod_list_{trace}.csv").open() as file:
        return [
            GpuRequest(
                gpus=int(row["num_gpu"]),
                milli=int(float(row["gpu_milli"] or 0)) or WHOLE_DEVICE,
                models=frozenset((row.get("gpu_spec") or "").split("|")) - {""},
                cpu_cores=int(row["cpu_milli"]) / 1000,
                host_memory_mib=int(row["memory_mib"]),
            )
            for row in csv.DictReader(file)
        ]


def demand(request: GpuRequest) -> int:
    return request.gpus * request.milli


def arrivals(requests: Sequence[GpuRequest], capacity: int, seed: int) -> list[GpuRequest]:
    """Return the trace shuffled, then samples of it until enough GPU has arrived."""
    chance = np.random.default_rng(seed)
    stream = [requests[index] for index in chance.permutation(len(requests))]
    arrived = sum(demand(request) for request in stream)
    while arrived < ARRIVED_AT_END * capacity:
        stream.append(requests[int(chance.integers(len(requests)))])
        arrived += demand(stream[-1])
    return stream


class Books:
    """What is free, kept apart from the broker's own count; refuses a placement that breaks a constraint."""

    def __init__(self, fleet: Fleet) -> None:
        self._free = {device.id: WHOLE_DEVICE for node in fleet.nodes for device in node.devices}
        self._model = {device.id: device.model for node in fleet.nodes for device in node.devices}
        self._node_of = {device.id: node.name for node in fleet.nodes for device in node.devices}
        self._devices = {node.name: [device.id for device in node.devices] for node in fleet.nodes}
        self._left = {node.name: [millicores(node.cpu_cores), node.memory_mib] for node in fleet.nodes}
        self.capacity = len(self._free) * WHOLE_DEVICE
        self.allocated = 0

    def take(self, request: GpuRequest, devices: Sequence[DeviceId], node: NodeName) -> None:
        """Apply a placement."""
        left = self._left[node]
        left[0] -= millicores(request.cpu_cores)
        left[1] -= request.host_memory_mib
        for device in devices:
            self._free[device] -= request.milli
        self.allocated += demand(request)
        alright = (
            min(left) >= 0
            and len(set(devices)) == len(devices) == request.gpus
            and all(self._free[each] >= 0 and self._node_of[each] == node for each in devices)
            and all(not request.models or self._model[each] in request.models for each in devices)
        )
        if not alright:
            raise RuntimeError(f"{request} on {node}, {list(devices)} breaks a constraint")

    def has_room(self, request: GpuRequest) -> bool:
        """Return whether some node could take the request whole."""
        return any(
            left[0] >= millicores(request.cpu_cores)
            and left[1] >= request.host_memory_mib
            and sum(
                self._free[device] >= request.milli
                and (not request.models or self._model[device] in request.models)
                for device in self._devices[name]
            )
            >= request.gpus
            for name, left in self._left.items()
        )


class Replay:
    """One run of the trace through the broker's engine."""

    def __init__(self, fleet: Fleet) -> None:
        self._engine = Engine(CyclePolicy(), fleet)
        self._node_of = {device.id: node.name for node in fleet.nodes for device in node.devices}
        self._number = 0
        self.books = Books(fleet)
        self.declined = 0
        self.decision_s: list[float] = []

    def arrive(self, request: GpuRequest) -> None:
        """Place a request or drop it."""
        if request.gpus == 0:
            self._place_without_gpu(request)
            return
        self._number += 1
        claim = Claim(ClaimId(f"pod-{self._number}"), request, NOW)
        began = time.thread_time()
        self._engine.submit(claim)
        decisions = self._engine.turn(NOW)
        self.decision_s.append(time.thread_time() - began)
        devices = decisions.placements[0].devices if decisions.placements else ()
        # A pod runs on one node. The broker spreads a gang only when no node has room for all of it, so to
        # drop what it spreads is to drop what does not fit; keeping it would beat the others unfairly.
        if len({self._node_of[device] for device in devices}) == 1:
            self.books.take(request, devices, self._node_of[devices[0]])
            return
        if devices:
            self._engine.not_granted(claim.id)
        self._engine.withdraw(claim.id)
        self.declined += self.books.has_room(request)

    def _place_without_gpu(self, request: GpuRequest) -> None:
        capacity, mix = self._engine.floor.capacity, self._engine.floor.placer.mix
        layout = capacity.layout
        cpu, memory = millicores(request.cpu_cores), request.host_memory_mib
        bank = np.flatnonzero(
            (capacity.cpu[layout.node_of] >= cpu) & (capacity.memory[layout.node_of] >= memory)
        )
        if not len(bank):
            return
        node, kind = layout.node_of[bank], layout.kind_of[bank]
        milli, free = capacity.milli[bank], capacity.milli[bank].sum(axis=1)
        cost = (capacity.cpu[node] - cpu) / layout.cpu.max()
        cost = cost + mix.fragments(kind, capacity.cpu[node] - cpu, milli)
        cost = cost - mix.fragments(kind, capacity.cpu[node], milli)
        cost = cost + mix.stranded(capacity.cpu[node] - cpu, capacity.memory[node] - memory, free)
        cost = cost - mix.stranded(capacity.cpu[node], capacity.memory[node], free)
        best = int(node[np.argmin(cost)])
        capacity.take(Part((), ((best, cpu, memory),)))
        self.books.take(request, [], layout.nodes[best].name)


def replay(fleet: Fleet, requests: Sequence[GpuRequest], seed: int) -> dict[str, float]:
    """Return the figures of one seed."""
    run = Replay(fleet)
    arrived, at_100 = 0, None
    capacity = run.books.capacity
    for request in arrivals(requests, capacity, seed):
        run.arrive(request)
        arrived += demand(request)
        if at_100 is None and arrived >= capacity:
            at_100 = 100 * run.books.allocated / capacity
    return {
        "seed": seed,
        "allocation_pct_100": round(at_100 or 0.0, 2),
        "allocation_pct_130": round(100 * run.books.allocated / capacity, 2),
        "declined": run.declined,
        "decision_p50_us": round(median(run.decision_s) * 1e6),
    }


def main() -> None:
    """Read the arguments, print a line for each seed and one JSON object at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the openb csv files")
    parser.add_argument("--trace", default="default", help="NAME of openb_pod_list_NAME.csv")
    parser.add_argument("--seeds", default="101,102,103")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    args = parser.parse_args()
    fleet, requests = read_fleet(args.data), read_requests(args.data, args.trace)
    runs = []
    for seed in args.seeds.split(","):
        runs.append(replay(fleet, requests, int(seed)))
        if not args.json:
            print(runs[-1], flush=True)
    summary = {
        "trace": args.trace,
        "allocation_pct_100": round(fmean(run["allocation_pct_100"] for run in runs), 2),
        "allocation_pct_130": round(fmean(run["allocation_pct_130"] for run in runs), 2),
        "declined": sum(run["declined"] for run in runs),
        "runs": runs,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
