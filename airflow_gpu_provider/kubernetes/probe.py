"""A cluster as `inventory.agent.Agent` reads a host: all its nodes, from memory.

When the cluster was not heard of for `grace_s`, nothing is reported: the broker sees the nodes go stale, as
those of a host whose agent died, instead of getting a guess. A node's report is made anew only when something
of it changed. `cluster_agent` is the command line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from airflow_gpu_provider.inventory.probe import NO_LEASES, Leases, Probe
from airflow_gpu_provider.kubernetes.api import ClusterApi
from airflow_gpu_provider.kubernetes.dcgm import Reading
from airflow_gpu_provider.kubernetes.metrics import Metrics
from airflow_gpu_provider.kubernetes.mirror import ClusterMirror, NodeCollection, NodeState, PodCollection
from airflow_gpu_provider.kubernetes.names import slot_id
from airflow_gpu_provider.kubernetes.report import node_report
from airflow_gpu_provider.kubernetes.watch import Watcher
from airflow_gpu_provider.reports import NodeReport

#: as long as the broker waits for a silent agent
GRACE_S = 10.0
_NODES = "/api/v1/nodes"
#: Pods that are over or have no node take nothing: a cluster may keep thousands of them.
_PODS_FIELDS = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Told:
    """A report, and what it was made of."""

    version: int
    leases: tuple[frozenset[str] | None, ...]
    readings: tuple[Reading, ...]
    report: NodeReport | None


class ClusterProbe:
    """Reads one cluster, once `start` was called."""

    def __init__(
        self,
        name: str,
        api: ClusterApi,
        *,
        namespaces: Sequence[str] = (),
        metrics: Callable[[ClusterMirror], Metrics] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """Watch pods of all namespaces, or of these, for whom may not see all."""
        self.name = name
        self._grace_s = grace_s
        self.mirror = ClusterMirror()
        self._watchers = [Watcher(api, _NODES, NodeCollection(self.mirror))]
        for namespace in namespaces or (None,):
            path = "/api/v1/pods" if namespace is None else f"/api/v1/namespaces/{namespace}/pods"
            collection = PodCollection(self.mirror, namespace)
            self._watchers.append(Watcher(api, path, collection, fields=_PODS_FIELDS))
        self._metrics = None if metrics is None else metrics(self.mirror)
        self._told: dict[str, _Told] = {}
        self._is_stale = False

    def start(self) -> None:
        """Begin to watch."""
        for each in (*self._watchers, *((self._metrics,) if self._metrics else ())):
            each.start()

    def stop(self) -> None:
        """End all watching."""
        for each in (*self._watchers, *((self._metrics,) if self._metrics else ())):
            each.stop()

    def wait_listed(self, seconds: float) -> bool:
        """Wait until all was listed once; False when that took longer."""
        return all(watcher.listed.wait(seconds) for watcher in self._watchers)

    def read(self, leases: Leases = NO_LEASES) -> tuple[NodeReport, ...]:
        """Return all nodes as they are known now; nothing when that is too old."""
        behind = [watcher.behind_s() for watcher in self._watchers]
        is_stale = any(seconds is None or seconds > self._grace_s for seconds in behind)
        if is_stale != self._is_stale and None not in behind:
            log.log(
                logging.WARNING if is_stale else logging.INFO,
                "Cluster %s %s",
                self.name,
                f"was not heard of for {self._grace_s:g} s: its nodes are not reported until it is"
                if is_stale
                else "is heard of again: its nodes are reported",
            )
        self._is_stale = is_stale
        if is_stale:
            return ()
        reports = [self._report(state, leases) for state in self.mirror.states()]
        return tuple(report for report in reports if report is not None)

    def _report(self, state: NodeState, leases: Leases) -> NodeReport | None:
        node = state.node
        held = tuple(
            leases.get(slot_id(self.name, node.name, offer.resource, index))
            for offer in node.offers
            for index in range(offer.slots)
        )
        measured = () if self._metrics is None else self._metrics.of(node.name)
        told = self._told.get(node.name)
        if told is None or (told.version, told.leases, told.readings) != (state.version, held, measured):
            told = _Told(state.version, held, measured, self._made(state, leases, measured))
            self._told[node.name] = told
        return told.report

    def _made(self, state: NodeState, leases: Leases, measured: tuple[Reading, ...]) -> NodeReport | None:
        try:
            return node_report(self.name, state.node, state.pods, leases, measured)
        except ValidationError as error:  # one odd node must not hide all others
            log.warning("Node %s of cluster %s cannot be reported: %s", state.node.name, self.name, error)
            return None


class ClusterProbes:
    """Several clusters as one."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        self._probes = tuple(probes)

    def read(self, leases: Leases = NO_LEASES) -> tuple[NodeReport, ...]:
        """Return the nodes of all clusters that are heard of."""
        return tuple(node for probe in self._probes for node in probe.read(leases))
