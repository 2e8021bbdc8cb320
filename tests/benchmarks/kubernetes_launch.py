"""What clusters cost: a gang of pods from start to end, and the inventory of a big cluster.

Run ``python -m tests.benchmarks.kubernetes_launch --pods 64 --json``. The imitated API server runs in a
process of its own, over real HTTP; its pods end at once and nobody pulls an image, so what is measured is our
own. ``own_seconds`` is the time to create a gang of ``--pods`` pods, see each of them end and delete all of
them. ``inventory_seconds`` is from an empty mirror to the reports of ``--nodes`` nodes; ``watch_cpu_pct`` is
the share of one core that watching ``--watched`` pods takes while each changes once in ten seconds, reports
once a second included (they go nowhere). Nothing was measured on a real cluster.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from airflow_gpu_provider.inventory.agent import Agent
from airflow_gpu_provider.kubernetes.api import ClusterApi
from airflow_gpu_provider.kubernetes.gang import Gang, Member
from airflow_gpu_provider.kubernetes.pod_gang import PodGang
from airflow_gpu_provider.kubernetes.probe import ClusterProbe
from airflow_gpu_provider.kubernetes.sparing import SparingReports
from airflow_gpu_provider.reports import ReportAnswer
from tests.benchmarks.output import show
from tests.kubernetes.builders import gpu_node, pod
from tests.kubernetes.imitation import Fate, Imitation, running
from tests.kubernetes.object_store import Change

_CHANGES_EVERY_S = 10.0


def serve(pipe: Connection, nodes: int, pods: int) -> None:
    """Run an imitated cluster: its pods change once told to, until told to stop."""
    with running() as cluster:
        cluster.scheduler.is_on = False  # its look at every node is not what is measured
        cluster.call(cluster.api.store.listeners.append, lambda change: bind(cluster, change))
        cluster.kubelet.fates["gpu-"] = Fate(runs_s=0)
        # as many labels as real nodes have
        labels = {f"example.com/fact-{number}": "x" * 20 for number in range(40)}
        cluster.create(*(gpu_node(f"gpu-{number}", labels=labels) for number in range(nodes)))
        cluster.create(*(pod(f"pod-{at}", gpus=1, node=f"gpu-{at % nodes}") for at in range(pods)))
        pipe.send(cluster.url)
        stopping = threading.Event()
        changing = threading.Thread(target=change_pods, args=(cluster, pods, stopping))
        if pipe.recv() == "change":
            changing.start()
            pipe.recv()
            stopping.set()
            changing.join()


def bind(cluster: Imitation, change: Change) -> None:
    """Bind a pod that is pinned to a node as soon as it is created."""
    created = change.after
    if change.resource.plural != "pods" or created is None or created["spec"].get("nodeName"):
        return
    rule = created["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    [node] = rule["nodeSelectorTerms"][0]["matchFields"][0]["values"]
    cluster.api.store.replace(change.resource, {**created, "spec": {**created["spec"], "nodeName": node}})


def change_pods(cluster: Imitation, pods: int, stopping: threading.Event) -> None:
    """Change one pod after the other, each once in ten seconds."""
    number, begun = 0, time.monotonic()
    while not stopping.wait(max(0.0, begun + number * _CHANGES_EVERY_S / pods - time.monotonic())):
        text = str(number)
        cluster.change("pods", f"pod-{number % pods}", lambda each: _annotated(each, text))  # noqa: B023
        number += 1


def _annotated(each: dict[str, Any], text: str) -> dict[str, Any]:
    return {**each, "metadata": {**each["metadata"], "annotations": {"example.com/beat": text}}}


@contextmanager
def served(*, nodes: int, pods: int) -> Iterator[tuple[Any, Connection]]:
    """Yield a client of a cluster in a process of its own, and the pipe to it."""
    from kubernetes import client

    pipe, theirs = multiprocessing.Pipe()
    cluster = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, nodes, pods))
    cluster.start()
    yield client.ApiClient(client.Configuration(host=pipe.recv())), pipe
    pipe.send("stop")
    cluster.join()


def launch(pods: int) -> dict[str, Any]:
    """Start a gang, follow it to its end, delete it."""
    members = tuple(Member(rank, f"gpu-{rank}", {"nvidia.com/gpu": 8}) for rank in range(pods))
    gang = Gang(lease="bench", task="bench", image="x:1", members=members)
    with served(nodes=pods, pods=0) as (api, _):
        started = PodGang(api, "default", gang, override=lambda body: body, start_s=600)
        cpu, begun = time.process_time(), time.perf_counter()
        with started.running(lambda: 5.0) as running_gang:
            running_gang.follow(lambda: None)
        own_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
    return {"pods": pods, "own_seconds": round(own_s, 2), "own_cpu_seconds": round(cpu_s, 2)}


def inventory(*, nodes: int, pods: int, seconds: float) -> dict[str, Any]:
    """Load the inventory of a big cluster, then watch it for some seconds."""
    sent: list[int] = []

    def send(body: Any) -> ReportAnswer:
        sent.append(len(body.model_dump_json()))
        return ReportAnswer()

    with served(nodes=nodes, pods=pods) as (api, pipe):
        probe = ClusterProbe("bench", ClusterApi(api))
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
        probe.stop()
    return {
        "nodes": found,
        "watched_pods": pods,
        "inventory_seconds": round(inventory_s, 2),
        "watch_cpu_pct": round(100 * cpu_s / watched_s, 2),
        "changes_per_s": pods / _CHANGES_EVERY_S,
        "report_bytes_per_s": round(sum(sent[1:]) / watched_s),
    }


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--watched", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = launch(options.pods)
    found |= inventory(nodes=options.nodes, pods=options.watched, seconds=options.seconds)
    show(found, as_json=options.json)


if __name__ == "__main__":
    main()
