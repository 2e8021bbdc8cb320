"""`GpuPodsOperator` by `dag.test()`: a served broker, an imitated cluster whose pods are real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.inventory.agent import Agent
from airflow_gpu_provider.kubernetes.names import TASK_LABEL, task_label
from airflow_gpu_provider.kubernetes.probe import ClusterProbe
from airflow_gpu_provider.kubernetes.sparing import SparingReports
from airflow_gpu_provider.operators.gpu_pods import GpuPodsOperator
from airflow_gpu_provider.operators.leased import GpuLeasedOperator
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.wire import ClaimView
from tests.kubernetes.builders import gpu_node, pod
from tests.kubernetes.imitation import Fate, Imitation, running
from tests.kubernetes.test_watch import client_of
from tests.operators.training_worker import context

DAGS = Path(__file__).parent / "dags"
ROOT = Path(__file__).resolve().parents[2]


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


def _config(cluster: Imitation, folder: Path) -> Path:
    return cluster.write_kubeconfig(folder / "kubeconfig")


def test_tasks_run_pods_on_leased_gpus_and_leave_nothing_behind(
    dag_test: Callable[..., Any],
    environment: dict[str, str],
    broker: Broker,
    cluster: Imitation,
    tmp_path: Path,
) -> None:
    connection = {"conn_type": "kubernetes", "extra": {"kube_config_path": str(_config(cluster, tmp_path))}}
    run = dag_test(
        DAGS, "pods_of_a_cluster", environment={**environment, "AIRFLOW_CONN_PROD": json.dumps(connection)}
    )
    assert run.tasks == {"fine": "success", "wrong": "failed"}
    assert "[0] SEEN 0 of 2" in run.output
    assert "crashed: exit code 3" in run.output
    assert broker.repository.live_leases() == []
    assert cluster.all("pods") == cluster.all("services") == []
    assert len(cluster.requests("POST /api/v1/namespaces/default/pods")) == 4


@pytest.fixture
def workers(
    environment: dict[str, str], cluster: Imitation, tmp_path: Path
) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """Return what starts a try of one task in a process of its own; its pods end once `go_on` is there."""
    connection = {"conn_type": "kubernetes", "extra": {"kube_config_path": str(_config(cluster, tmp_path))}}
    more = {**environment, "AIRFLOW_CONN_PROD": json.dumps(connection), "PYTHONPATH": str(ROOT)}
    waits = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go_on')!r}): time.sleep(0.05)"
    command = json.dumps([sys.executable, "-c", waits])
    started: list[subprocess.Popen[str]] = []

    def start(try_number: int) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "tests.operators.pods_worker", str(try_number), command]
        with (tmp_path / f"worker-{try_number}.log").open("w") as log:
            started.append(
                subprocess.Popen(
                    words,
                    env={**os.environ, **more},
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            )
        return started[-1]

    yield start
    for worker in started:
        worker.kill()
        worker.wait()


def _begin(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()


@pytest.mark.slow
def test_the_next_try_goes_on_with_the_pods_of_a_killed_worker(
    workers: Callable[[int], subprocess.Popen[str]], cluster: Imitation, broker: Broker, tmp_path: Path
) -> None:
    first, second = workers(1), workers(2)
    for number in (1, 2):
        loaded = tmp_path / f"worker-{number}.log"
        cluster.wait_for(lambda: "READY" in loaded.read_text(), "it is loaded", seconds=120)  # noqa: B023
    _begin(first)
    running = ["Running", "Running"]
    cluster.wait_for(
        lambda: [pod["status"]["phase"] for pod in cluster.all("pods")] == running, "both run", seconds=60
    )
    first.kill()
    lists = len(cluster.requests("GET /api/v1/namespaces/default/pods"))
    _begin(second)
    cluster.wait_for(
        lambda: len(cluster.requests("GET /api/v1/namespaces/default/pods")) > lists, "it looks", seconds=60
    )
    (tmp_path / "go_on").touch()
    said = json.loads(second.communicate(timeout=60)[0].splitlines()[-1])
    assert sorted(said["result"]["nodes"].values()) == ["gpu-0", "gpu-1"], said
    assert len(cluster.requests("POST /api/v1/namespaces/default/pods")) == 4, "two, and two that were there"
    assert cluster.all("pods") == cluster.all("services") == []


def test_who_waits_ends_what_an_earlier_try_left_running(
    cluster: Imitation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    connection = {"conn_type": "kubernetes", "extra": {"kube_config_path": str(_config(cluster, tmp_path))}}
    monkeypatch.setenv("AIRFLOW_CONN_PROD", json.dumps(connection))
    task = GpuPodsOperator(task_id="train", image="x:1", gpus=1, kubernetes_conn_id="prod")
    own, other = (task_label("d", run, "train", -1) for run in ("run", "another run"))
    cluster.create(*(pod(name, labels={TASK_LABEL: label}) for name, label in (("own", own), ("not", other))))
    monkeypatch.setattr(GpuLeasedOperator, "_proceed", lambda *_, **__: "waits")
    view = ClaimView(claim_id="c", key=task.task_key(context("run", 2, 2)), state="pending")
    assert task._proceed(context("run", 2, 2), None, view, None) == "waits"
    cluster.wait_for(lambda: cluster.pod("own") is None, "its own pod is gone")
    assert cluster.pod("not") is not None
    cluster.stop_listening()  # nor is it a reason to fail when the cluster does not answer
    assert task._proceed(context("run", 2, 2), None, view, None) == "waits"


def test_what_pods_cannot_have_is_refused_when_the_dag_is_read() -> None:
    with pytest.raises(InvalidRequest, match="MIG slice"):
        GpuPodsOperator(task_id="t", image="x:1", memory="8GiB", shared=True)
    with pytest.raises(InvalidRequest, match="image is empty"):
        GpuPodsOperator(task_id="t", image="")
    request = GpuPodsOperator(task_id="t", image="x:1", kubernetes_conn_id="prod").build_request()
    assert (request.host, request.node_labels) == (None, frozenset({"kubernetes-cluster=prod"}))
