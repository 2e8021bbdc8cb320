"""Scheduler and kubelets of the imitation: each way a pod may end, as its status tells it."""

from __future__ import annotations

import sys
from typing import Any

import httpx
import pytest

from tests.kubernetes.builders import gpu_node, pod
from tests.kubernetes.imitation import Fate, Imitation


def status(cluster: Imitation, name: str = "one") -> dict[str, Any]:
    found = cluster.pod(name)
    return {} if found is None else found["status"]


def ends(cluster: Imitation, fate: Fate) -> dict[str, Any]:
    cluster.kubelet.fates["one"] = fate
    cluster.create(gpu_node(), pod("one", gpus=1))
    cluster.wait_for(lambda: status(cluster).get("phase") in ("Succeeded", "Failed"), "the pod is over")
    return status(cluster)


@pytest.mark.parametrize(
    ("fate", "phase", "reason", "code"),
    [
        (Fate(runs_s=0), "Succeeded", "Completed", 0),
        (Fate(runs_s=0, exit_code=3), "Failed", "Error", 3),
        (Fate(runs_s=0, exit_code=137, reason="OOMKilled"), "Failed", "OOMKilled", 137),
    ],
)
def test_a_container_ends_with_code_and_reason(
    cluster: Imitation, fate: Fate, phase: str, reason: str, code: int
) -> None:
    over = ends(cluster, fate)
    state = over["containerStatuses"][0]["state"]["terminated"]
    assert (over["phase"], state["reason"], state["exitCode"]) == (phase, reason, code)


def test_an_evicted_pod_says_so_itself(cluster: Imitation) -> None:
    over = ends(cluster, Fate(runs_s=0, evicted="The node was low on resource: memory."))
    assert (over["phase"], over["reason"]) == ("Failed", "Evicted")
    assert any(each["type"] == "DisruptionTarget" for each in over["conditions"])


def test_a_node_may_refuse_a_pod_that_was_bound_to_it(cluster: Imitation) -> None:
    assert ends(cluster, Fate(refused="UnexpectedAdmissionError"))["reason"] == "UnexpectedAdmissionError"


def test_an_image_that_cannot_be_pulled_keeps_a_pod_pending_and_it_can_be_deleted(cluster: Imitation) -> None:
    cluster.kubelet.fates["one"] = Fate(stuck="ImagePullBackOff")
    cluster.create(gpu_node(), pod("one", gpus=1))
    cluster.wait_for(lambda: "containerStatuses" in status(cluster), "the kubelet has tried")
    state = status(cluster)["containerStatuses"][0]["state"]
    assert (status(cluster)["phase"], state["waiting"]["reason"]) == ("Pending", "ImagePullBackOff")
    cluster.delete("pods", "one")
    cluster.wait_for(lambda: cluster.pod("one") is None, "the pod is gone")


def test_what_does_not_fit_is_told_with_numbers(cluster: Imitation) -> None:
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    cluster.create(gpu_node("gpu-0", taints=[taint]), gpu_node("gpu-1", gpus=4), pod("one", gpus=8))
    cluster.wait_for(lambda: status(cluster).get("conditions"), "the scheduler has looked")
    told = status(cluster)["conditions"][0]
    assert (told["type"], told["reason"]) == ("PodScheduled", "Unschedulable")
    assert told["message"].startswith(
        "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) had unt"
    )


def test_devices_of_a_pod_are_free_again_when_it_is_over(cluster: Imitation) -> None:
    cluster.kubelet.fates["short"] = Fate(runs_s=0.05)
    cluster.create(gpu_node(gpus=1), pod("short", gpus=1), pod("next", gpus=1))
    cluster.wait_for(lambda: status(cluster, "next").get("phase") == "Running", "the next one runs")
    assert status(cluster, "short")["phase"] == "Succeeded"


def test_pods_of_a_lost_node_are_condemned_and_stay(cluster: Imitation) -> None:
    cluster.create(gpu_node(), pod("one", gpus=1))
    cluster.wait_for(lambda: status(cluster).get("phase") == "Running", "it runs")
    cluster.lose_node("gpu-0")
    found = cluster.pod("one")
    assert found is not None and "deletionTimestamp" in found["metadata"]
    assert found["status"]["phase"] == "Running"
    assert any(
        each["reason"] == "DeletionByTaintManager"
        for each in found["status"]["conditions"]
        if "reason" in each
    )
    cluster.delete("pods", "one", gracePeriodSeconds=0)
    assert cluster.pod("one") is None


def log(cluster: Imitation) -> str:
    # not by the official client: version 36 returns the repr of bytes
    return httpx.get(f"{cluster.url}/api/v1/namespaces/default/pods/one/log").text


def test_a_command_runs_as_a_process_and_its_log_is_served(cluster: Imitation) -> None:
    cluster.kubelet.fates["one"] = Fate(runs_command=True)
    script = "import os; print('hello from', os.environ['NODE'], flush=True); raise SystemExit(4)"
    body = pod("one", gpus=1, command=[sys.executable, "-c", script])
    reference = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    body["spec"]["containers"][0]["env"] = [{"name": "NODE", "valueFrom": reference}]
    cluster.create(gpu_node(), body)
    cluster.wait_for(lambda: status(cluster).get("phase") == "Failed", "the command has ended")
    assert status(cluster)["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 4
    assert log(cluster) == "hello from gpu-0\n"


def test_a_deleted_command_is_asked_to_end_first(cluster: Imitation) -> None:
    cluster.kubelet.fates["one"] = Fate(runs_command=True)
    script = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'saved\\n'), sys.exit(0)))\n"
        "os.write(1, b'ready\\n')\ntime.sleep(60)"
    )
    cluster.create(
        gpu_node(), pod("one", gpus=1, command=[sys.executable, "-c", script], finalizers=["a.org/x"])
    )
    cluster.wait_for(lambda: any(cluster.api.pod_calls.logs.values()), "it is ready")
    cluster.delete("pods", "one")
    cluster.wait_for(lambda: status(cluster).get("phase") == "Succeeded", "it has ended by itself")
    assert log(cluster) == "ready\nsaved\n"
