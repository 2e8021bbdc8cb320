"""A node of a cluster as the broker sees it: closed, tainted, labelled."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_gpu_provider.kubernetes.nodes import ClusterNode, cluster_node
from tests.kubernetes.builders import gpu_node


def read(node: dict[str, Any]) -> ClusterNode:
    found = cluster_node(node)
    assert found is not None
    return found


def with_ready(status: str, reason: str) -> dict[str, Any]:
    node = gpu_node()
    node["status"]["conditions"] = [{"type": "Ready", "status": status, "reason": reason}]
    return node


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (with_ready("Unknown", "NodeStatusUnknown"), "the node is not ready: NodeStatusUnknown"),
        ({**gpu_node(), "spec": {"unschedulable": True}}, "cordoned"),
        (
            gpu_node(taints=[{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]),
            "about to be removed",
        ),
        (
            gpu_node(taints=[{"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}]),
            "disk-pressure",
        ),
        (
            {**gpu_node(), "metadata": {"name": "x", "deletionTimestamp": "2026-01-01T00:00:00Z"}},
            "being removed",
        ),
    ],
)
def test_what_kubernetes_keeps_pods_off_is_closed(node: dict[str, Any], why: str) -> None:
    assert why in str(read(node).closed)


def test_a_fine_node_is_open() -> None:
    taints = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}, {"key": "x", "effect": "PreferNoSchedule"}]
    node = read(gpu_node(taints=taints))
    assert node.closed is None
    assert "taint" not in node.labels


def test_taints_are_for_tasks_to_tolerate_by_key_and_value() -> None:
    taints = [
        {"key": "dedicated", "value": "vision", "effect": "NoSchedule"},
        {"key": "spot", "effect": "NoExecute"},
    ]
    assert read(gpu_node(taints=taints)).labels["taint"] == "dedicated=vision,spot"


def test_a_node_says_where_it_stands_by_the_usual_labels() -> None:
    labels = {"topology.kubernetes.io/zone": "a", "nvidia.com/gpu.clique": "abc.1", "team": "vision"}
    found = read(gpu_node(labels=labels)).labels
    assert (found["zone"], found["rack"], found["team"]) == ("a", "abc.1", "vision")


def test_labels_stay_within_what_a_report_takes() -> None:
    many = {f"example.com/label-{number:03}": "x" for number in range(300)}
    features = {f"feature.node.kubernetes.io/cpu-{number}": "true" for number in range(300)}
    taint = {"key": "lab", "effect": "NoSchedule"}
    found = read(
        gpu_node(labels={**many, **features, "topology.kubernetes.io/zone": "a"}, taints=[taint])
    ).labels
    assert len(found) <= 100
    assert (found["zone"], found["taint"]) == ("a", "lab")
    assert not any(name.startswith("feature.") for name in found)


def test_room_is_what_pods_may_have() -> None:
    node = gpu_node(cpu="64", memory="512Gi")
    node["status"]["allocatable"] |= {"cpu": "63500m", "memory": "500Gi"}
    found = read(node)
    assert (found.cpu_cores, found.memory_mib) == (63.5, 500 * 1024)


def test_a_node_without_gpus_is_none_of_ours() -> None:
    assert cluster_node(gpu_node(resources={})) is None
