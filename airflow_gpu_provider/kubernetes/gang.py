"""The pods of a gang as they are written: one on each leased node, and a service by which they meet.

Pure. What the author overrides is merged first; then each pod is pinned: to its node, its GPUs and its lease,
which no override can change, or it would use what it does not hold. All pods belong to the service, so that
deleting that leaves nothing behind. The next step is `pod_gang`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.kubernetes.names import GPU_PREFIX, LEASE_LABEL, TASK_LABEL, resource_of

Object = dict[str, Any]

MASTER_PORT = 29500  #: torchrun's usual one
CONTAINER = "main"
_ANY_TAINT = "*"


@dataclass(frozen=True, slots=True)
class Member:
    """One pod: its node and the GPUs that are leased there."""

    rank: int
    node: str
    gpus: Mapping[str, int]  #: by resource

    @property
    def size(self) -> int:
        """How many GPUs it has."""
        return sum(self.gpus.values())


@dataclass(frozen=True, slots=True)
class Gang:
    """All pods of one lease."""

    lease: str
    task: str  #: value of the task's label
    image: str
    members: tuple[Member, ...]
    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    tolerates: frozenset[str] = frozenset()
    cpu_cores: float = 0.0  #: of all pods together
    memory_mib: int = 0  #: likewise
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its service; its pods add their rank."""
        return f"gpu-{self.lease}"

    def pod_name(self, member: Member) -> str:
        """Return the name of a pod."""
        return f"{self.name}-{member.rank}"

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its pods and its service."""
        return {LEASE_LABEL: self.lease, TASK_LABEL: self.task}

    @property
    def size(self) -> int:
        """How many GPUs it has."""
        return sum(member.size for member in self.members)


def members_of(cluster: str, devices: Iterable[tuple[str, str]]) -> tuple[Member, ...]:
    """Return a pod for each node of these (node, slot) pairs, in the order of the lease."""
    by_node: dict[str, Counter[str]] = {}
    for node, slot in devices:
        resource = resource_of(slot)
        if resource is None or not node.startswith(f"{cluster}/"):
            raise InvalidRequest(
                f"Device {slot} of node {node} is no GPU of cluster {cluster}: its pods cannot use it. Does "
                "a cluster agent report that cluster under the name of this connection?"
            )
        by_node.setdefault(node.removeprefix(f"{cluster}/"), Counter())[resource] += 1
    return tuple(Member(rank, node, dict(gpus)) for rank, (node, gpus) in enumerate(by_node.items()))


def service_body(gang: Gang) -> Object:
    """Return the headless service, which gives each pod a name before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": gang.name, "labels": gang.labels, "annotations": dict(gang.annotations)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LEASE_LABEL: gang.lease},
            "ports": [{"name": "master", "port": MASTER_PORT}],
        },
    }


def pod_body(gang: Gang, member: Member) -> Object:
    """Return a pod before anything is overridden."""
    container: Object = {"name": CONTAINER, "image": gang.image, "env": _variables(gang, member)}
    if gang.command:
        container["command"] = list(gang.command)
    if gang.arguments:
        container["args"] = list(gang.arguments)
    part, requests = member.size / gang.size, {}
    if gang.cpu_cores:
        requests["cpu"] = f"{max(1, round(1000 * gang.cpu_cores * part))}m"
    if gang.memory_mib:
        requests["memory"] = f"{max(1, round(gang.memory_mib * part))}Mi"
    if requests:
        container["resources"] = {"requests": requests}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": gang.pod_name(member), "annotations": dict(gang.annotations)},
        "spec": {"containers": [container]},
    }


def pinned(body: Mapping[str, Any], gang: Gang, member: Member, service: Mapping[str, Any]) -> Object:
    """Return a pod that uses what is leased, whatever was overridden."""
    pod = copy.deepcopy(dict(body))
    metadata, spec = pod["metadata"], pod["spec"]
    metadata["name"] = gang.pod_name(member)
    metadata["labels"] = {**(metadata.get("labels") or {}), **gang.labels}
    owner = {name: service["metadata"][name] for name in ("name", "uid")}
    metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Service", **owner}]
    for name in ("nodeName", "schedulingGates"):
        spec.pop(name, None)
    spec |= {"restartPolicy": "Never", "hostname": gang.pod_name(member), "subdomain": gang.name}
    _pin_node(spec, member.node)
    spec["tolerations"] = [*(spec.get("tolerations") or []), *_tolerations(gang.tolerates, member)]
    for number, container in enumerate([*spec["containers"], *(spec.get("initContainers") or [])]):
        _pin_gpus(container, member.gpus if number == 0 else {})
    return pod


def _variables(gang: Gang, member: Member) -> list[Object]:
    ours = {
        "GPU_LEASE_ID": gang.lease,
        "NODE_RANK": str(member.rank),
        "NNODES": str(len(gang.members)),
        "NPROC_PER_NODE": str(member.size),
        "WORLD_SIZE": str(gang.size),
        "MASTER_ADDR": f"{gang.pod_name(gang.members[0])}.{gang.name}",
        "MASTER_PORT": str(MASTER_PORT),
    }
    return [{"name": name, "value": value} for name, value in {**ours, **gang.env}.items()]


def _pin_node(spec: Object, node: str) -> None:
    """Add the node to what the author asks of nodes; the scheduler still checks taints and room."""
    field_of_node = {"key": "metadata.name", "operator": "In", "values": [node]}
    affinity = spec.setdefault("affinity", {})
    rule = affinity.setdefault("nodeAffinity", {})
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    terms: Sequence[Object] = (rule.get(key) or {}).get("nodeSelectorTerms") or [{}]
    pinned_terms = [{**term, "matchFields": [*term.get("matchFields", []), field_of_node]} for term in terms]
    rule[key] = {"nodeSelectorTerms": pinned_terms}


def _pin_gpus(container: Object, gpus: Mapping[str, int]) -> None:
    """Let a container have exactly these GPUs."""
    resources = container.get("resources") or {}
    for kind in ("limits", "requests"):
        kept = {
            name: value
            for name, value in (resources.get(kind) or {}).items()
            if not name.startswith(GPU_PREFIX)
        }
        resources[kind] = {**kept, **{name: str(number) for name, number in gpus.items()}}
    container["resources"] = resources


def _tolerations(tolerates: frozenset[str], member: Member) -> list[Object]:
    """Return tolerations for the taints that the task tolerates, and for those of nodes with its GPUs."""
    if _ANY_TAINT in tolerates:
        return [{"operator": "Exists"}]
    own = sorted({GPU_PREFIX + "gpu", *member.gpus})
    found: list[Object] = [{"key": name, "operator": "Exists"} for name in own]
    for taint in sorted(tolerates):
        key, _, value = taint.partition("=")
        how = {"operator": "Equal", "value": value} if value else {"operator": "Exists"}
        found.append({"key": key, **how})
    return found
