"""The pods of a gang as they are written: valid, pinned, and no override can loosen that."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.kubernetes.gang import Gang, Member, members_of, pinned, pod_body, service_body
from airflow_gpu_provider.kubernetes.names import LEASE_LABEL, TASK_LABEL, slot_id, task_label
from airflow_gpu_provider.operators.gpu_pods import GpuPodsOperator
from tests.kubernetes import schemas

LEASE = "3f2f7d1e-8a0f-4d7e-9d9c-2c6b8a1f0e55"
SERVICE = {"metadata": {"name": f"gpu-{LEASE}", "uid": "u1"}}
MEMBERS = (Member(0, "gpu-0", {"nvidia.com/gpu": 3}), Member(1, "gpu-1", {"nvidia.com/gpu": 1}))


def gang(**more: Any) -> Gang:
    return Gang(lease=LEASE, task=task_label("d", "manual__2026-01-01T00:00:00+00:00", "t", -1), image="x:1",
                members=MEMBERS, **more)  # fmt: skip


def written(of: Gang, override: dict[str, Any] | None = None, member: int = 0) -> dict[str, Any]:
    operator = GpuPodsOperator(task_id="t", image="x:1", pod_override=override)
    return pinned(operator._override()(pod_body(of, MEMBERS[member])), of, MEMBERS[member], SERVICE)


@pytest.mark.parametrize("version", ["1.30", "1.34", "1.37"])
def test_what_is_written_is_valid_in_each_version(version: str) -> None:
    full = gang(
        command=("torchrun",),
        arguments=("a",),
        cpu_cores=3,
        memory_mib=4096,
        tolerates=frozenset({"a=b", "c"}),
    )
    schemas.check(service_body(full), version)
    schemas.check(written(full), version)
    override = {
        "spec": {"serviceAccountName": "trainer", "containers": [{"name": "main", "volumeMounts": []}]}
    }
    schemas.check(written(full, override), version)


def test_a_pod_gets_its_gpus_and_its_part_of_the_room_on_its_node() -> None:
    of = gang(cpu_cores=8, memory_mib=4096)
    first, second = (written(of, member=number)["spec"]["containers"][0]["resources"] for number in (0, 1))
    assert first["limits"] == {"nvidia.com/gpu": "3"}
    assert first["requests"] == {"cpu": "6000m", "memory": "3072Mi", "nvidia.com/gpu": "3"}
    assert second["requests"]["cpu"] == "2000m"


def test_the_variables_are_those_of_torchrun() -> None:
    body = written(gang(env={"EPOCHS": "3"}), member=1)
    variables = {each["name"]: each["value"] for each in body["spec"]["containers"][0]["env"]}
    assert (variables["NODE_RANK"], variables["NNODES"], variables["WORLD_SIZE"]) == ("1", "2", "4")
    assert (variables["NPROC_PER_NODE"], variables["EPOCHS"]) == ("1", "3")
    assert variables["MASTER_ADDR"] == f"gpu-{LEASE}-0.gpu-{LEASE}"


def test_no_override_takes_what_is_not_leased() -> None:
    eight = {"nvidia.com/gpu": "8"}
    override = {
        "metadata": {"name": "mine", "labels": {LEASE_LABEL: "another", "team": "vision"}},
        "spec": {
            "nodeName": "gpu-9",
            "restartPolicy": "Always",
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "containers": [
                {"name": "main", "image": "y:2", "resources": {"limits": {**eight, "memory": "1Gi"}}},
                {"name": "more", "image": "s:1", "resources": {"limits": {"nvidia.com/mig-1g.5gb": "1"}}},
            ],
            "initContainers": [{"name": "i", "image": "i:1", "resources": {"requests": eight}}],
        },
    }
    body = written(gang(), override)
    spec, (main, sidecar) = body["spec"], body["spec"]["containers"]
    assert "nodeName" not in spec and spec["restartPolicy"] == "Never"
    assert main["image"] == "y:2"
    assert main["resources"]["limits"] == {"memory": "1Gi", "nvidia.com/gpu": "3"}
    assert "nvidia.com" not in f"{sidecar['resources']}{spec['initContainers'][0]['resources']}"
    labels = body["metadata"]["labels"]
    assert (labels[LEASE_LABEL], labels["team"], len(labels[TASK_LABEL])) == (LEASE, "vision", 32)
    assert body["metadata"]["name"] == f"gpu-{LEASE}-0"
    assert {"key": "spot", "operator": "Exists"} in spec["tolerations"]


def test_the_node_is_added_to_what_the_author_asks_of_nodes() -> None:
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}
    rule = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    body = written(gang(), {"spec": {"affinity": rule, "containers": []}})
    [term] = body["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term["matchExpressions"] == [zone]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": ["gpu-0"]}]


def test_taints_that_the_task_tolerates_are_those_that_its_pods_do() -> None:
    tolerations = written(gang(tolerates=frozenset({"dedicated=vision", "spot"})))["spec"]["tolerations"]
    assert {"key": "dedicated", "operator": "Equal", "value": "vision"} in tolerations
    assert {"key": "spot", "operator": "Exists"} in tolerations
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in tolerations
    assert written(gang(tolerates=frozenset({"*"})))["spec"]["tolerations"] == [{"operator": "Exists"}]


def test_devices_become_one_pod_a_node_by_their_resource() -> None:
    slices = [("prod/n-1", slot_id("prod", "n-1", "nvidia.com/mig-1g.5gb", index)) for index in (0, 4)]
    whole = [("prod/n-0", slot_id("prod", "n-0", "nvidia.com/gpu", 7))]
    assert members_of("prod", [*slices, *whole]) == (
        Member(0, "n-1", {"nvidia.com/mig-1g.5gb": 2}),
        Member(1, "n-0", {"nvidia.com/gpu": 1}),
    )
    with pytest.raises(InvalidRequest, match="no GPU of cluster prod"):
        members_of("prod", [("n1", "GPU-5e1d")])
    with pytest.raises(InvalidRequest, match="no GPU of cluster lab"):
        members_of("lab", whole)
