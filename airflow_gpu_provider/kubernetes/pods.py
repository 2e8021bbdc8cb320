"""What a pod takes of its node.

Kubernetes reserves for a pod what its containers need together, or its largest init container if that is
more; sidecars (init containers that go on) count for both. Pods that are over take nothing, pods that are
being deleted still do. The next step is `mirror`, which keeps what was read here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_gpu_provider.kubernetes.names import GPU_PREFIX, LEASE_LABEL
from airflow_gpu_provider.kubernetes.quantities import cores, count, mib

Object = Mapping[str, Any]
PodName = tuple[str, str]  #: namespace and name

_OVER = frozenset({"Succeeded", "Failed"})
_EXPORTER_LABELS = (("app", "nvidia-dcgm-exporter"), ("app.kubernetes.io/name", "dcgm-exporter"))


@dataclass(frozen=True, slots=True)
class Needs:
    """What a container or a pod takes."""

    cpu_cores: float = 0.0
    memory_mib: int = 0
    gpus: Mapping[str, int] = field(default_factory=dict)  #: by resource, such as "nvidia.com/gpu"

    def plus(self, other: Needs) -> Needs:
        """Return both together."""
        gpus = Counter(self.gpus)
        gpus.update(other.gpus)
        return Needs(self.cpu_cores + other.cpu_cores, self.memory_mib + other.memory_mib, dict(gpus))

    def at_least(self, other: Needs) -> Needs:
        """Return the larger of the two, resource by resource."""
        gpus = Counter(self.gpus) | Counter(other.gpus)
        return Needs(max(self.cpu_cores, other.cpu_cores), max(self.memory_mib, other.memory_mib), dict(gpus))


NOTHING = Needs()


@dataclass(frozen=True, slots=True)
class PodUse:
    """A pod on a node, and what it takes there."""

    name: PodName
    node: str
    needs: Needs
    lease: str | None = None  #: the lease that it runs under
    exporter_ip: str | None = None  #: where it tells what the node's GPUs do, for a DCGM exporter


def pod_name(pod: Object) -> PodName:
    """Return a pod's namespace and name."""
    metadata = pod["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def pod_use(pod: Object) -> PodUse | None:
    """Return what a pod takes of its node; None before it has one, and once it is over."""
    spec, status, labels = pod["spec"], pod.get("status", {}), pod["metadata"].get("labels") or {}
    node = spec.get("nodeName")
    if not node or status.get("phase") in _OVER:
        return None
    is_exporter = any(labels.get(label) == value for label, value in _EXPORTER_LABELS)
    return PodUse(
        name=pod_name(pod),
        node=node,
        needs=pod_needs(spec),
        lease=labels.get(LEASE_LABEL),
        exporter_ip=status.get("podIP") if is_exporter else None,
    )


def pod_needs(spec: Object) -> Needs:
    """Return what a pod takes."""
    sidecars, largest_start = NOTHING, NOTHING
    for container in spec.get("initContainers") or ():
        needs = _container_needs(container)
        if container.get("restartPolicy") == "Always":
            sidecars = sidecars.plus(needs)
            largest_start = largest_start.at_least(sidecars)
        else:
            largest_start = largest_start.at_least(sidecars.plus(needs))
    together = sidecars.plus(_sum(spec["containers"])).at_least(largest_start)
    return _with_pod_level(together, spec).plus(_needs(spec.get("overhead") or {}))


def _sum(containers: Iterable[Object]) -> Needs:
    total = NOTHING
    for container in containers:
        total = total.plus(_container_needs(container))
    return total


def _container_needs(container: Object) -> Needs:
    return _needs(_asked(container.get("resources") or {}))


def _asked(resources: Object) -> Object:
    """Return the requests; what has a limit only is requested up to it."""
    return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}


def _with_pod_level(needs: Needs, spec: Object) -> Needs:
    """Return what the pod as a whole asks for in place of its containers' sum, CPU and memory only."""
    asked = _asked(spec.get("resources") or {})
    return Needs(
        cores(asked["cpu"]) if "cpu" in asked else needs.cpu_cores,
        mib(asked["memory"]) if "memory" in asked else needs.memory_mib,
        needs.gpus,
    )


def _needs(asked: Object) -> Needs:
    return Needs(
        cpu_cores=cores(asked.get("cpu", 0)),
        memory_mib=mib(asked.get("memory", 0)),
        gpus={name: count(value) for name, value in asked.items() if name.startswith(GPU_PREFIX)},
    )
