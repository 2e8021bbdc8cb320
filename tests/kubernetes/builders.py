"""Nodes and pods as tests need them, complete enough for the strict schemas."""

from __future__ import annotations

from typing import Any

from tests.kubernetes.object_store import Object, timestamp


def gpu_node(
    name: str = "gpu-0",
    *,
    gpus: int = 8,
    product: str = "NVIDIA-H100-80GB-HBM3",
    memory_mib: int = 81_559,
    resources: dict[str, int] | None = None,
    labels: dict[str, str] | None = None,
    taints: list[Object] | None = None,
    cpu: str = "64",
    memory: str = "512Gi",
) -> Object:
    """Return a node as GPU feature discovery and the device plugin describe it."""
    offered = {"nvidia.com/gpu": gpus} if resources is None else resources
    quantities = {"cpu": cpu, "memory": memory, "pods": "110", **{key: str(n) for key, n in offered.items()}}
    found = {
        "kubernetes.io/hostname": name,
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.product": product,
        "nvidia.com/gpu.count": str(gpus),
        "nvidia.com/gpu.memory": str(memory_mib),
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**(found if offered else {}), **(labels or {})}},
        "spec": {"taints": taints} if taints else {},
        "status": {
            "capacity": dict(quantities),
            "allocatable": dict(quantities),
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "KubeletReady",
                    "lastTransitionTime": timestamp(),
                }
            ],
        },
    }


def pod(
    name: str,
    *,
    gpus: int | str = 0,
    resource: str = "nvidia.com/gpu",
    cpu: str | None = None,
    labels: dict[str, str] | None = None,
    command: list[str] | None = None,
    node: str | None = None,
    owner: Object | None = None,
    finalizers: list[str] | None = None,
    **spec: Any,
) -> Object:
    """Return a pod of one container that is never restarted."""
    limits = {**({resource: str(gpus)} if gpus else {}), **({"cpu": cpu} if cpu else {})}
    container: Object = {"name": "main", "image": "example.invalid/train:1"}
    if limits:
        container["resources"] = {"limits": limits}
    if command:
        container["command"] = command
    metadata: Object = {"name": name, **({"labels": labels} if labels else {})}
    if finalizers:
        metadata["finalizers"] = finalizers
    if owner is not None:
        reference = {key: owner[key] for key in ("apiVersion", "kind")}
        held = {key: owner["metadata"][key] for key in ("name", "uid")}
        metadata["ownerReferences"] = [{**reference, **held, "controller": True}]
    own: Object = {"containers": [container], "restartPolicy": "Never", **spec}
    if node is not None:
        own["nodeName"] = node
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": own}
