"""What a big cluster's inventory costs the cluster agent, against the imitated API server over real HTTP.

Run ``python -m tests.benchmarks.cluster_inventory --nodes 1000 --pods 1000 --json``. The imitation runs in a
process of its own. ``inventory_seconds`` is from an empty mirror to the reports of all nodes;
``watch_cpu_pct`` is the share of one core that watching takes while every pod changes once in ten seconds,
reports once a second included (they go nowhere). Nothing was measured on a real cluster.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from airflow_gpu_provider.inventory.agent import Agent
from airflow_gpu_provider.kubernetes.api import ClusterApi
from airflow_gpu_provider.kubernetes.probe import ClusterProbe
from airflow_gpu_provider.kubernetes.sparing import SparingReports
from airflow_gpu_provider.reports import ReportAnswer
from tests.benchmarks.output import show
from tests.kubernetes.builders import gpu_node, pod
from tests.kubernetes.imitation import Imitation, running

_CHANGES_EVERY_S = 10.0


def serve(pipe: Connection, nodes: int, pods: int) -> None:
    """Run the imitated cluster: its pods change once told to, until told to stop."""
    with running() as cluster:
        cluster.scheduler.is_on = False
        labels = {
            f"example.com/fact-{number}": "x" * 20 for number in range(40)
        }  # as many as real nodes have
        cluster.create(*(gpu_node(f"gpu-{number}", labels=labels) for number in range(nodes)))
        cluster.create(
            *(pod(f"pod-{number}", gpus=1, node=f"gpu-{number % nodes}") for number in range(pods))
        )
        pipe.send(cluster.url)
        pipe.recv()
        stopping = threading.Event()
        changing = threading.Thread(target=change, args=(cluster, pods, stopping))
        changing.start()
        pipe.recv()
        stopping.set()
        changing.join()


def change(cluster: Imitation, pods: int, stopping: threading.Event) -> None:
    """Change one pod after the other, each once in ten seconds."""
    number, begun = 0, time.monotonic()
    while not stopping.wait(max(0.0, begun + number * _CHANGES_EVERY_S / pods - time.monotonic())):
        text = str(number)
        cluster.change("pods", f"pod-{number % pods}", lambda each: _annotated(each, text))  # noqa: B023
        number += 1


def _annotated(each: dict[str, Any], text: str) -> dict[str, Any]:
    return {**each, "metadata": {**each["metadata"], "annotations": {"example.com/beat": text}}}


def measure(*, nodes: int, pods: int, seconds: float) -> dict[str, Any]:
    """Load the inventory, then watch for some seconds."""
    from kubernetes import client

    pipe, theirs = multiprocessing.Pipe()
    cluster = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, nodes, pods))
    cluster.start()
    api = ClusterApi(client.ApiClient(client.Configuration(host=pipe.recv())))
    probe = ClusterProbe("bench", api)
    sent: list[int] = []

    def send(body: Any) -> ReportAnswer:
        sent.append(len(body.model_dump_json()))
        return ReportAnswer()

    agent, begun = Agent(probe, SparingReports(send)), time.perf_counter()
    probe.start()
    probe.wait_listed(600)
    found = len(probe.read())
    inventory_s = time.perf_counter() - begun
    pipe.send("change")
    agent.step()
    cpu, start = time.process_time(), time.perf_counter()
    while time.perf_counter() - start < seconds:
        agent.step()
        time.sleep(1.0)
    watched_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    pipe.send("stop")
    probe.stop()
    cluster.join()
    return {
        "nodes": found,
        "pods": pods,
        "inventory_seconds": round(inventory_s, 2),
        "watch_cpu_pct": round(100 * cpu_s / watched_s, 2),
        "changes_per_s": pods / _CHANGES_EVERY_S,
        "report_bytes_per_s": round(sum(sent[1:]) / watched_s),
    }


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    show(measure(nodes=options.nodes, pods=options.pods, seconds=options.seconds), as_json=options.json)


if __name__ == "__main__":
    main()
