"""The nodes with GPUs of a cluster and the pods on them, as last heard.

Watches write, the probe reads; a node's version grows whenever something of it changes, so that a reader need
not compare. Only what counts is kept of an object: a cluster's pods are many and their JSON is large.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from airflow_gpu_provider.kubernetes.nodes import ClusterNode, cluster_node
from airflow_gpu_provider.kubernetes.pods import PodName, PodUse, pod_name, pod_use


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node with its pods, of one moment."""

    node: ClusterNode
    pods: tuple[PodUse, ...]
    version: int


class ClusterMirror:
    """What is known of a cluster. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, ClusterNode] = {}
        self._pods: dict[PodName, PodUse] = {}
        self._on_node: defaultdict[str, dict[PodName, PodUse]] = defaultdict(dict)
        self._versions: defaultdict[str, int] = defaultdict(int)

    def states(self) -> list[NodeState]:
        """Return all nodes with GPUs, by name."""
        with self._lock:
            return [
                NodeState(node, tuple(self._on_node[name].values()), self._versions[name])
                for name, node in sorted(self._nodes.items())
            ]

    def leased_pods(self) -> list[PodUse]:
        """Return the pods that carry a lease."""
        with self._lock:
            return [pod for pod in self._pods.values() if pod.lease]

    def exporters(self) -> list[PodUse]:
        """Return the DCGM exporters of nodes with GPUs."""
        with self._lock:
            return [pod for pod in self._pods.values() if pod.exporter_ip and pod.node in self._nodes]

    def put_node(self, node: ClusterNode | None, name: str) -> None:
        """Take a node; None forgets it."""
        with self._lock:
            # the kubelet's heartbeat changes an object, but nothing that counts
            if self._nodes.get(name) == node:
                return
            self._versions[name] += 1
            if node is None:
                del self._nodes[name]
            else:
                self._nodes[name] = node

    def replace_nodes(self, nodes: Iterable[ClusterNode]) -> None:
        """Take all nodes."""
        found = {node.name: node for node in nodes}
        with self._lock:
            gone = self._nodes.keys() - found.keys()
        for name in gone:
            self.put_node(None, name)
        for name, node in found.items():
            self.put_node(node, name)

    def put_pod(self, pod: PodUse | None, name: PodName) -> None:
        """Take what a pod takes; None forgets it."""
        with self._lock:
            before = self._pods.get(name)
            if before == pod:
                return
            if before is not None:
                del self._pods[name], self._on_node[before.node][name]
                self._versions[before.node] += 1
            if pod is not None:
                self._pods[name] = self._on_node[pod.node][name] = pod
                self._versions[pod.node] += 1

    def replace_pods(self, pods: Iterable[PodUse], within: str | None = None) -> None:
        """Take all pods, or those of one namespace."""
        found = {pod.name: pod for pod in pods}
        with self._lock:
            known = [name for name in self._pods if within is None or name[0] == within]
        for name in known:
            if name not in found:
                self.put_pod(None, name)
        for name, pod in found.items():
            self.put_pod(pod, name)


class NodeCollection:
    """Nodes as a watch tells them."""

    def __init__(self, mirror: ClusterMirror) -> None:
        self._mirror = mirror

    def replace(self, objects: list[dict[str, Any]]) -> None:
        """Take all nodes."""
        self._mirror.replace_nodes(node for each in objects if (node := cluster_node(each)) is not None)

    def put(self, each: dict[str, Any]) -> None:
        """Take a node."""
        self._mirror.put_node(cluster_node(each), each["metadata"]["name"])

    def remove(self, each: dict[str, Any]) -> None:
        """Forget a node."""
        self._mirror.put_node(None, each["metadata"]["name"])


class PodCollection:
    """Pods as a watch tells them, of all namespaces or of one."""

    def __init__(self, mirror: ClusterMirror, namespace: str | None = None) -> None:
        self._mirror = mirror
        self._namespace = namespace

    def replace(self, objects: list[dict[str, Any]]) -> None:
        """Take all pods."""
        uses = (use for each in objects if (use := pod_use(each)) is not None)
        self._mirror.replace_pods(uses, self._namespace)

    def put(self, each: dict[str, Any]) -> None:
        """Take a pod."""
        self._mirror.put_pod(pod_use(each), pod_name(each))

    def remove(self, each: dict[str, Any]) -> None:
        """Forget a pod."""
        self._mirror.put_pod(None, pod_name(each))
