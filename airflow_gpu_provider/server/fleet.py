"""The fleet in memory: the newest report of every node, folded from agents and from the database.

Reports come once a second and stay here; the database hears of a node when something that matters for a
placement changed, or after `_REFRESH_S` so that other replicas see it is alive. A node whose report is old
is *stale*: still part of the fleet, but none of its devices is offered.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import datetime

from airflow_gpu_provider.broker.model import Device, DeviceId, Fleet, Node, NodeName
from airflow_gpu_provider.store.nodes import StoredNode
from airflow_gpu_provider.wire import DeviceReport, NodeReport

_REFRESH_S = 3.0


class FleetMirror:
    """Newest reports by node. Thread-safe."""

    def __init__(self, *, stale_after_s: float, forget_after_s: float) -> None:
        self._stale_after_s = stale_after_s
        self._forget_after_s = forget_after_s
        self._lock = threading.Lock()
        self._nodes: dict[str, StoredNode] = {}
        self._saved: dict[str, StoredNode] = {}

    def fold(self, reports: Iterable[NodeReport], now: datetime) -> bool:
        """Take reports of an agent; return True when what can be placed may have changed."""
        changed = False
        with self._lock:
            for report in reports:
                before = self._nodes.get(report.name)
                changed |= (
                    before is None or self._is_stale(before, now) or _facts(before.report) != _facts(report)
                )
                self._nodes[report.name] = StoredNode(report, now)
        return changed

    def merge(self, stored: Iterable[StoredNode]) -> None:
        """Take what other replicas stored, where it is newer than what is known here."""
        with self._lock:
            for node in stored:
                known = self._nodes.get(node.report.name)
                if known is None or known.reported_at < node.reported_at:
                    self._nodes[node.report.name] = node
                    self._saved[node.report.name] = node

    def unsaved(self) -> list[StoredNode]:
        """Return the nodes that the database should hear of."""
        with self._lock:
            return [node for name, node in self._nodes.items() if self._is_due(self._saved.get(name), node)]

    def mark_saved(self, nodes: Iterable[StoredNode]) -> None:
        """Remember what the database has."""
        with self._lock:
            for node in nodes:
                self._saved[node.report.name] = node

    def stored(self, now: datetime) -> list[StoredNode]:
        """Return all nodes of the fleet by name, after dropping those that left for good."""
        with self._lock:
            for name in [n for n, s in self._nodes.items() if self._age_s(s, now) > self._forget_after_s]:
                del self._nodes[name]
                self._saved.pop(name, None)
            return [self._nodes[name] for name in sorted(self._nodes)]

    def fleet(self, now: datetime) -> Fleet:
        """Return the core's value of the fleet as it is now."""
        return Fleet(tuple(self._to_node(stored, now) for stored in self.stored(now)))

    def stale_reason(self, stored: StoredNode, now: datetime) -> str | None:
        """Return why the node's devices are not offered, None when its report is fresh."""
        if not self._is_stale(stored, now):
            return None
        # Without the age: the sentence becomes part of reasons that are written only where they change.
        return f"no report for more than {self._stale_after_s:g} s"

    def _to_node(self, stored: StoredNode, now: datetime) -> Node:
        report = stored.report
        return Node(
            name=NodeName(report.name),
            host=report.host,
            cpu_cores=report.cpu_cores,
            memory_mib=report.memory_mib,
            devices=tuple(_to_device(device, report.name) for device in report.devices),
            load=report.load,
            unavailable=self.stale_reason(stored, now),
            labels=report.labels,
        )

    def _age_s(self, stored: StoredNode, now: datetime) -> float:
        return (now - stored.reported_at).total_seconds()

    def _is_stale(self, stored: StoredNode, now: datetime) -> bool:
        return self._age_s(stored, now) > self._stale_after_s

    @staticmethod
    def _is_due(saved: StoredNode | None, node: StoredNode) -> bool:
        if saved is None or _facts(saved.report) != _facts(node.report):
            return True
        return (node.reported_at - saved.reported_at).total_seconds() >= _REFRESH_S


def unavailable_reason(device: DeviceReport) -> str | None:
    """Return why a device is not offered, None when it is fine."""
    if device.suspect:
        return device.suspect
    if device.foreign_pids:
        pids = ", ".join(str(pid) for pid in device.foreign_pids[:5])
        return f"used by processes outside the broker (pid {pids})"
    return None


def _to_device(report: DeviceReport, node: str) -> Device:
    return Device(
        id=DeviceId(report.id),
        node=NodeName(node),
        model=report.model,
        memory_mib=report.memory_mib,
        tflops=report.tflops,
        utilisation=report.utilisation,
        memory_used_mib=report.memory_used_mib,
        unavailable=unavailable_reason(report),
        simulated=report.simulated,
    )


def _facts(report: NodeReport) -> tuple[object, ...]:
    """Return what a placement depends on, without the measurements that change every second."""
    return (
        report.host,
        report.cpu_cores,
        report.memory_mib,
        tuple(sorted(report.labels.items())),
        None if report.load is None else round(report.load, 1),
        tuple((d.id, d.model, d.memory_mib, d.tflops, unavailable_reason(d)) for d in report.devices),
    )
