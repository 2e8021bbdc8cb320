"""`GpuPodsOperator` by `dag.test()`: a served broker, an imitated cluster whose pods are real processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.inventory.agent import Agent
from airflow_gpu_provider.kubernetes.probe import ClusterProbe
from airflow_gpu_provider.kubernetes.sparing import SparingReports
from airflow_gpu_provider.operators.gpu_pods import GpuPodsOperator
from airflow_gpu_provider.server.broker import Broker
from tests.kubernetes.builders import gpu_node
from tests.kubernetes.imitation import Fate, Imitation, running
from tests.kubernetes.test_watch import client_of

DAGS = Path(__file__).parent / "dags"


@pytest.fixture
def cluster(broker: Broker) -> Iterator[Imitation]:
    """Run a cluster of two nodes with two GPUs each that the broker is told of."""
    with running(schemas="1.34") as started:
        taint = {"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}
        started.create(*(gpu_node(f"gpu-{number}", gpus=2) for number in range(2)))
        started.create(gpu_node("gpu-2", gpus=2, taints=[taint]))
        started.kubelet.fates["gpu-"] = Fate(runs_command=True)
        probe, is_over = ClusterProbe("prod", client_of(started)), threading.Event()
        probe.start()
        assert probe.wait_listed(10)
        agent = Agent(probe, SparingReports(broker.report), interval_s=0.1)
        telling = threading.Thread(target=agent.run, args=(is_over.wait,))
        telling.start()
        yield started
        is_over.set()
        telling.join()
        probe.stop()


def test_tasks_run_pods_on_leased_gpus_and_leave_nothing_behind(
    dag_test: Callable[..., Any],
    environment: dict[str, str],
    broker: Broker,
    cluster: Imitation,
    tmp_path: Path,
) -> None:
    config = cluster.write_kubeconfig(tmp_path / "config")
    connection = {"conn_type": "kubernetes", "extra": {"kube_config_path": str(config)}}
    run = dag_test(
        DAGS, "pods_of_a_cluster", environment={**environment, "AIRFLOW_CONN_PROD": json.dumps(connection)}
    )
    assert run.tasks == {"fine": "success", "wrong": "failed"}
    assert "[0] SEEN 0 of 2" in run.output
    assert "crashed: exit code 3" in run.output
    assert broker.repository.live_leases() == []
    assert cluster.all("pods") == cluster.all("services") == []
    assert len(cluster.requests("POST /api/v1/namespaces/default/pods")) == 4


def test_what_pods_cannot_have_is_refused_when_the_dag_is_read() -> None:
    with pytest.raises(InvalidRequest, match="MIG slice"):
        GpuPodsOperator(task_id="t", image="x:1", memory="8GiB", shared=True)
    with pytest.raises(InvalidRequest, match="image is empty"):
        GpuPodsOperator(task_id="t", image="")
    request = GpuPodsOperator(task_id="t", image="x:1", kubernetes_conn_id="prod").build_request()
    assert (request.host, request.node_labels) == (None, frozenset({"kubernetes-cluster=prod"}))
