"""Names that both sides agree on: those who count what pods take, and those who start pods.

A pod with `LEASE_LABEL` takes what its lease holds, so it is not counted a second time. All GPUs of a cluster
are asked for by resources below `GPU_PREFIX`.
"""

from __future__ import annotations

import uuid
from functools import lru_cache

GPU_PREFIX = "nvidia.com/"

#: label of pods that the provider starts: the lease that they run under
LEASE_LABEL = "airflow-gpu-provider/lease"
#: label of a reported node: the cluster that it belongs to
CLUSTER_LABEL = "kubernetes-cluster"

_SLOTS = uuid.UUID("3b0a9c54-7a0f-5d3e-8f57-0d1c8a7be2f1")


def node_name(cluster: str, node: str) -> str:
    """Return the name under which the broker knows a node: those of two clusters may be called alike."""
    return f"{cluster}/{node}"


@lru_cache(maxsize=200_000)
def slot_id(cluster: str, node: str, resource: str, index: int) -> str:
    """Return the id of a slot, the same for the same place whoever reports it.

    A slot is no particular GPU: Kubernetes counts, and a node's kubelet picks the GPU when a pod starts.
    """
    return f"GPU-slot-{uuid.uuid5(_SLOTS, f'{cluster}/{node}/{resource}/{index}')}"
