"""A cluster's GPUs under lease: from its API server through the agent to a real broker, and back."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_gpu_provider.inventory.agent import Agent
from airflow_gpu_provider.kubernetes.names import LEASE_LABEL
from airflow_gpu_provider.kubernetes.probe import ClusterProbe
from airflow_gpu_provider.kubernetes.sparing import SparingReports
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.wire import ClaimBody, RequestBody, TaskKey
from tests.kubernetes.builders import gpu_node, pod
from tests.kubernetes.imitation import Imitation
from tests.kubernetes.test_watch import client_of
from tests.server.conftest import broker, look, settings  # noqa: F401 - fixtures

COMMAND = [
    *(sys.executable, "-m", "airflow_gpu_provider.kubernetes.cluster_agent"),
    *("--name", "prod", "--once"),
]
ROOT = Path(__file__).resolve().parents[2]


def ask_in_cluster(broker: Broker, task: str, gpus: int) -> str:  # noqa: F811
    key = TaskKey(dag_id="d", run_id="r", task_id=task, map_index=-1, try_number=1)
    request = RequestBody(gpus=gpus, node_labels=("kubernetes-cluster=prod",))
    return asyncio.run(broker.submit(ClaimBody(key=key, request=request), is_attended=False)).claim_id


@pytest.fixture
def probe(cluster: Imitation) -> ClusterProbe:
    return ClusterProbe("prod", client_of(cluster))


def test_what_is_free_is_leased_and_pods_under_the_lease_take_nothing_more(
    cluster: Imitation,
    probe: ClusterProbe,
    broker: Broker,  # noqa: F811
) -> None:
    cluster.create(gpu_node("gpu-0", gpus=4), pod("notebook", gpus=1, node="gpu-0"))
    probe.start()
    try:
        assert probe.wait_listed(10)
        agent = Agent(probe, SparingReports(broker.report))
        agent.step()
        gang, late = ask_in_cluster(broker, "gang", 3), ask_in_cluster(broker, "late", 1)
        held = look(broker, gang, "granted").held
        assert held is not None
        assert look(broker, late, "granted", seconds=0.3).state.value == "pending"
        shard = pod("shard", gpus=3, node="gpu-0", labels={LEASE_LABEL: held.lease_id})
        cluster.create(shard)
        cluster.delete("pods", "notebook", gracePeriodSeconds=0)

        def is_granted() -> bool:
            agent.step()
            return asyncio.run(broker.find(late)).state.value == "granted"

        cluster.wait_for(is_granted, "the slot that the notebook gave back is leased")
    finally:
        probe.stop()


def test_the_command_tells_a_cluster_of_a_kubeconfig(cluster: Imitation, tmp_path: Path) -> None:
    cluster.create(gpu_node("gpu-0", gpus=2))
    config = cluster.write_kubeconfig(tmp_path / "config")
    more = ["--kubeconfig", str(config), "--dcgm", "none", "--print"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*COMMAND, *more], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    [node] = json.loads(done.stdout)["nodes"]
    assert (node["name"], [device["model"] for device in node["devices"]]) == ("prod/gpu-0", ["H100", "H100"])


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    more = ["--kubeconfig", str(tmp_path / "none"), "--print"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*COMMAND, *more], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu cluster agent: There is no way to the cluster prod: ")
