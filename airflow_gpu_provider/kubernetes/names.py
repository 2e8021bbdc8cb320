"""Names that both sides agree on: those who count what pods take, and those who start pods.

A pod with `LEASE_LABEL` takes what its lease holds, so it is not counted a second time. All GPUs of a cluster
are asked for by resources below `GPU_PREFIX`.
"""

from __future__ import annotations

import hashlib
import json

GPU_PREFIX = "nvidia.com/"

#: label of pods that the provider starts: the lease that they run under
LEASE_LABEL = "airflow-gpu-provider/lease"
#: label of a reported node: the cluster that it belongs to
CLUSTER_LABEL = "kubernetes-cluster"

#: label of pods and services that the provider starts: the task, whichever try
TASK_LABEL = "airflow-gpu-provider/task"


def node_name(cluster: str, node: str) -> str:
    """Return the name under which the broker knows a node: those of two clusters may be called alike."""
    return f"{cluster}/{node}"


def slot_id(cluster: str, node: str, resource: str, index: int) -> str:
    """Return the id of a slot, the same for the same place whoever reports it.

    A slot is no particular GPU: Kubernetes counts, and a node's kubelet picks the GPU when a pod starts.
    """
    return f"{node_name(cluster, node)}/{resource}/{index}"


def resource_of(slot: str) -> str | None:
    """Return the resource that a slot is counted under; None when this is no slot of a cluster."""
    parts = slot.rsplit("/", 3)
    is_slot = len(parts) == 4 and f"{parts[1]}/" == GPU_PREFIX and parts[3].isdecimal()
    return f"{parts[1]}/{parts[2]}" if is_slot else None


def task_label(*task: object) -> str:
    """Return the value of `TASK_LABEL` for a task: its ids may hold what a label may not."""
    return hashlib.sha256(json.dumps(task).encode()).hexdigest()[:32]
