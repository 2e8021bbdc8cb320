"""A node of a cluster as the broker should see it: its offers, room, labels, and why nothing may go there.

What Kubernetes itself keeps pods off (a node that is not ready, cordoned, short of something or about to be
removed) closes the node; other taints become taints of the broker, which a task may tolerate. The taint on
GPU nodes that only keeps off pods without GPUs is none. The next step is `report`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_gpu_provider.kubernetes.names import GPU_PREFIX
from airflow_gpu_provider.kubernetes.offers import Offer, offers_of
from airflow_gpu_provider.kubernetes.quantities import cores, mib
from airflow_gpu_provider.reports import MOST_LABELS
from airflow_gpu_provider.wire import MOST_NAME

Object = Mapping[str, Any]

ZONE_LABELS = ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone")
#: The last joins nodes whose GPUs are connected by NVLink, which is one rack.
RACK_LABELS = ("topology.kubernetes.io/rack", "cloud.provider.com/topology-rack", "nvidia.com/gpu.clique")
#: set by Kubernetes itself, beside the conditions that are told
_STATE_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
_REMOVAL_TAINTS = frozenset(
    {"ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption"}
)
_HARD = frozenset({"NoSchedule", "NoExecute"})
#: facts of the processor and the kernel that feature discovery writes by dozens
_LEFT_OUT = ("feature.node.kubernetes.io/", "beta.kubernetes.io/", "failure-domain.beta.kubernetes.io/")
#: labels that the broker gives a meaning of its own
_OURS = frozenset({"rack", "zone", "taint"})
_FOR_OURS = 10


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node with GPUs."""

    name: str
    offers: tuple[Offer, ...]
    cpu_cores: float
    memory_mib: int
    labels: Mapping[str, str] = field(default_factory=dict)
    closed: str | None = None  #: why no pod may go there, else None


def cluster_node(node: Object) -> ClusterNode | None:
    """Return a node; None when it has no GPUs."""
    status, labels = node.get("status", {}), node["metadata"].get("labels") or {}
    allocatable = status.get("allocatable") or {}
    offers = offers_of(labels, status.get("capacity") or {}, allocatable)
    if not offers:
        return None
    return ClusterNode(
        name=node["metadata"]["name"],
        offers=offers,
        cpu_cores=cores(allocatable.get("cpu", 0)),
        memory_mib=mib(allocatable.get("memory", 0)),
        labels=_labels(labels, _taints(node)),
        closed=_closed(node),
    )


def taint_name(taint: Object) -> str:
    """Return the name of a taint that a task says to tolerate it: KEY, or KEY=VALUE."""
    value = taint.get("value")
    return f"{taint['key']}={value}" if value else str(taint["key"])


def _taints(node: Object) -> list[Object]:
    """Return the taints that keep pods off."""
    taints = (node.get("spec") or {}).get("taints") or ()
    return [taint for taint in taints if taint.get("effect") in _HARD]


def _closed(node: Object) -> str | None:
    if "deletionTimestamp" in node["metadata"]:
        return "the node is being removed from its cluster"
    ready = _condition(node, "Ready")
    if ready.get("status") != "True":
        return f"the node is not ready: {ready.get('reason') or 'it has never reported'}"
    if (node.get("spec") or {}).get("unschedulable"):
        return "the node is cordoned (kubectl uncordon opens it)"
    for taint in _taints(node):
        if taint["key"] in _REMOVAL_TAINTS:
            return f"the node is about to be removed (taint {taint['key']})"
        if taint["key"].startswith(_STATE_TAINTS):
            return f"Kubernetes keeps pods off the node (taint {taint['key']})"
    return None


def _condition(node: Object, kind: str) -> Object:
    conditions: Iterable[Object] = (node.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each.get("type") == kind), {})


def _labels(labels: Mapping[str, str], taints: Iterable[Object]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in sorted(labels.items())
        if not name.startswith(_LEFT_OUT) and name not in _OURS and len(name) <= MOST_NAME
    }
    chosen = dict(list(kept.items())[: MOST_LABELS - _FOR_OURS])
    for ours, theirs in (("zone", ZONE_LABELS), ("rack", RACK_LABELS)):
        if value := next((labels[name] for name in (ours, *theirs) if labels.get(name)), None):
            chosen[ours] = value
    if names := sorted(taint_name(taint) for taint in taints if _is_for_tasks(taint)):
        chosen["taint"] = ",".join(names)[:MOST_NAME]
    return chosen


def _is_for_tasks(taint: Object) -> bool:
    """Return whether tasks have to tolerate it: all that ask for GPUs tolerate a taint named like one."""
    key = taint["key"]
    return not key.startswith((*_STATE_TAINTS, GPU_PREFIX)) and key not in _REMOVAL_TAINTS
