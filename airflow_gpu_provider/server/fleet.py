"""The fleet in memory: the newest report of every node, folded from agents and from the database.

Reports come once a second and stay here; the database hears of a node when something that matters for a
placement changed, or after `_REFRESH_S` so that other replicas see it is alive. A node whose report is old
is *stale*: still part of the fleet, but none of its devices is offered.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import replace
from datetime import datetime

from airflow_gpu_provider.broker.artifact_names import artifact_names
from airflow_gpu_provider.broker.flavor_table import rated
from airflow_gpu_provider.broker.flavors import Flavor
from airflow_gpu_provider.broker.model import Fleet, Node, NodeName
from airflow_gpu_provider.broker.peers import Station
from airflow_gpu_provider.reports import DeviceReport, NodeReport
from airflow_gpu_provider.server.known import Known
from airflow_gpu_provider.server.latencies import Latencies
from airflow_gpu_provider.server.reported import completed, facts, has_device, to_device
from airflow_gpu_provider.store.nodes import Glance, StoredNode

_REFRESH_S = 3.0


class FleetMirror:
    """Newest reports by node. Thread-safe."""

    def __init__(
        self,
        *,
        stale_after_s: float,
        forget_after_s: float,
        max_load: float,
        flavors: Mapping[str, Flavor] | None = None,
    ) -> None:
        """Devices of a model in ``flavors`` are rated by it, whatever their agents say.

        From ``max_load`` on a node gets nothing new.
        """
        self._max_load = max_load
        self._flavors = flavors or {}
        self._stale_after_s = stale_after_s
        self._forget_after_s = forget_after_s
        self._lock = threading.Lock()
        self._known: dict[str, Known] = {}
        #: the node that each device belongs to: two agents may report the same one
        self._owner: dict[str, str] = {}
        self._latencies = Latencies()
        self._latencies_to_save: set[str] = set()
        #: grows whenever what can be placed may have changed
        self.version = 0
        #: where each node answers those who measure the latency to it
        self.addresses: dict[str, str] = {}
        self.stations_version = 0  #: grows whenever other nodes answer, or stand elsewhere

    def fold(self, reports: Iterable[NodeReport], now: datetime) -> bool:
        """Take reports of an agent; return True when what can be placed may have changed."""
        before = self.version
        with self._lock:
            for report in reports:
                self._latencies.take(report, now)
                self._take(StoredNode(report, now))
        return self.version != before

    def merge(self, stored: Iterable[StoredNode]) -> None:
        """Take what other replicas stored, where it is newer than what is known here."""
        with self._lock:
            for node in stored:
                known = self._known.get(node.report.name)
                if known is None or known.stored.reported_at < node.reported_at:
                    self._latencies.take(node.report, node.reported_at, is_own=False)
                    taken = self._take(node)
                    taken.saved_facts, taken.saved_at = taken.facts, node.reported_at

    def unread(self, glances: Iterable[Glance]) -> list[str]:
        """Return the nodes of which the tables have news; note those that only are still alive."""
        news = []
        with self._lock:
            for each in glances:
                known = self._known.get(each.name)
                if known is None:
                    news.append(each.name)
                elif known.stored.reported_at < each.reported_at:
                    # 0 = written by a replica before migration 0014: what it tells is always news
                    if each.change and known.stored.change == each.change:
                        taken = self._take(replace(known.stored, reported_at=each.reported_at))
                        taken.saved_at = each.reported_at
                    else:
                        news.append(each.name)
        return news

    def age(self, now: datetime) -> None:
        """See which nodes became stale, drop those that left for good, and take in what was measured."""
        with self._lock:
            self._latencies_to_save |= self._latencies.to_save(now)
            self._apply_latencies(now)
            for name, known in list(self._known.items()):
                age_s = (now - known.stored.reported_at).total_seconds()
                if age_s > self._forget_after_s:
                    del self._known[name]
                    self._latencies.forget(name)
                    self.addresses.pop(name, None)
                    self.version += 1
                    self.stations_version += 1
                elif (age_s > self._stale_after_s) != known.is_stale:
                    known.is_stale = not known.is_stale
                    known.node = replace(known.node, unavailable=self._stale_reason(known.is_stale))
                    self.version += 1
                    self.stations_version += 1

    def unsaved(self) -> tuple[list[StoredNode], list[str]]:
        """Return the nodes that the database should hear of, and those that only are still alive."""
        changed, alive = [], []
        with self._lock:
            for name, known in self._known.items():
                if known.saved_facts != known.facts or name in self._latencies_to_save:
                    changed.append(self._whole(known.stored))
                elif known.unsaved_s() >= _REFRESH_S:
                    alive.append(name)
        return changed, alive

    def mark_saved(self, changed: Iterable[StoredNode], alive: Iterable[str]) -> None:
        """Remember what the database has."""
        with self._lock:
            for stored in changed:
                known = self._known.get(stored.report.name)
                self._latencies_to_save.discard(stored.report.name)
                if known is not None:
                    saved = facts(stored.report, self._max_load)
                    known.saved_facts = known.facts if saved == known.facts else saved
                    known.saved_at = stored.reported_at
            for name in alive:
                known = self._known.get(name)
                if known is not None:
                    known.saved_at = known.stored.reported_at

    def stored(self, names: Container[str] | None = None) -> list[StoredNode]:
        """Return the newest report of every node, or of these, by name, with all latencies it told."""
        with self._lock:
            known = sorted(name for name in self._known if names is None or name in names)
            return [self._whole(self._known[name].stored) for name in known]

    def size(self) -> tuple[int, int]:
        """Return how many nodes report, and how many devices they name."""
        with self._lock:
            return len(self._known), sum(len(each.stored.report.devices) for each in self._known.values())

    def latencies_among(self, names: Collection[str]) -> dict[str, dict[str, float]]:
        """Return what these nodes have measured of one another."""
        with self._lock:
            return self._latencies.among(names)

    def stations(self) -> list[Station]:
        """Return the nodes that answer those who measure the latency to them."""
        with self._lock:
            return [
                Station(name, known.stored.report.labels)
                for name, known in self._known.items()
                if known.stored.report.echo_at is not None and not known.is_stale
            ]

    def fleet(self, now: datetime) -> Fleet:
        """Return the core's value of the fleet as it is now."""
        self.age(now)
        with self._lock:
            return Fleet(
                tuple(self._with_own_devices(self._known[name].node) for name in sorted(self._known))
            )

    def _with_own_devices(self, node: Node) -> Node:
        if all(self._is_owned(device.id, node.name) for device in node.devices):
            return node
        own = tuple(device for device in node.devices if self._is_owned(device.id, node.name))
        return replace(node, devices=own)

    def also_reported_by(self, device_id: str, node: str) -> str | None:
        """Return the node that a device really belongs to, None when it is this one."""
        owner = self._owner.get(device_id, node)
        return None if owner == node else owner

    def stale_reason(self, stored: StoredNode, now: datetime) -> str | None:
        """Return why the node's devices are not offered, None when its report is fresh."""
        return self._stale_reason((now - stored.reported_at).total_seconds() > self._stale_after_s)

    def suspects(self) -> frozenset[str]:
        """Return the devices that agents call suspect."""
        with self._lock:
            reports = [known.stored.report for known in self._known.values()]
        return frozenset(device.id for report in reports for device in report.devices if device.suspect)

    def device(self, device_id: str) -> tuple[DeviceReport, NodeReport] | None:
        """Return a device and its node, None when no node reports it."""
        if self._devices_version != self.version:
            with self._lock:
                version = self.version
                self._devices = {
                    device.id: (device, known.stored.report)
                    for known in self._known.values()
                    for device in known.stored.report.devices
                    if self._is_owned(device.id, known.stored.report.name)
                }
                # Only now: who sees it reads the map without the lock.
                self._devices_version = version
        return self._devices.get(device_id)

    _devices_version = -1
    _devices: Mapping[str, tuple[DeviceReport, NodeReport]] = {}

    def _take(self, stored: StoredNode) -> Known:
        known = self._known.get(stored.report.name)
        if known is not None:
            stored = completed(stored, known.stored.report)
        report, matters = stored.report, facts(stored.report, self._max_load)
        is_same = known is not None and known.facts == matters and not known.is_stale
        if known is not None and is_same and known.owns_all:  # nearly every report
            known.stored = stored
            return known
        owns_all = self._own(report)
        self._note_station(report, known)
        if known is not None and is_same:
            known.stored, known.owns_all = stored, owns_all
            return known
        self.version += 1
        fresh = Known(stored, matters, self._to_node(report), owns_all)
        if known is not None:
            fresh.saved_facts, fresh.saved_at = known.saved_facts, known.saved_at
        self._known[report.name] = fresh
        return fresh

    def _note_station(self, report: NodeReport, known: Known | None) -> None:
        is_same = known is not None and known.stored.report.labels == report.labels and not known.is_stale
        if is_same and self.addresses.get(report.name) == report.echo_at:
            return
        self.stations_version += 1
        if report.echo_at is None:
            self.addresses.pop(report.name, None)
        else:
            self.addresses[report.name] = report.echo_at

    def _apply_latencies(self, now: datetime) -> None:
        """Let placements know of new latencies, of all nodes at once: each such change costs a decision."""
        for name in self._latencies.to_apply(now):
            if (known := self._known.get(name)) is not None:
                known.node = replace(known.node, latency_ms=self._latencies.of(name))
                self.version += 1

    def _whole(self, stored: StoredNode) -> StoredNode:
        """Return a report with all latencies of its node: the agent tells only what is new."""
        name = stored.report.name
        told = {"latency_ms": self._latencies.of(name), "loss": self._latencies.loss_of(name)}
        return StoredNode(stored.report.model_copy(update=told), stored.reported_at)

    def tflops(self, report: DeviceReport) -> float:
        """Return the rating of a device."""
        return rated(report.model, report.tflops, report.share, self._flavors)

    def _to_node(self, report: NodeReport) -> Node:
        return Node(
            name=NodeName(report.name),
            host=report.host,
            cpu_cores=report.cpu_cores,
            memory_mib=report.memory_mib,
            devices=tuple(to_device(each, report.name, self.tflops(each)) for each in report.devices),
            load=report.load,
            labels=report.labels,
            latency_ms=self._latencies.of(report.name),
            artifacts=artifact_names(report.artifacts or ()),
        )

    def _own(self, report: NodeReport) -> bool:
        """Let devices belong to the node that reported them first, as long as it does.

        Return whether all of the report's belong to its node now.
        """
        owns_all = True
        for device in report.devices:
            owner = self._known.get(self._owner.get(device.id, ""))
            if owner is not None and not owner.is_stale and has_device(owner.stored.report, device.id):
                owns_all = owns_all and owner.stored.report.name == report.name
                continue
            if self._owner.get(device.id) != report.name:
                self._owner[device.id] = report.name
                self.version += 1
        return owns_all

    def _is_owned(self, device_id: str, node: str) -> bool:
        return self._owner.get(device_id, node) == node

    def _stale_reason(self, is_stale: bool) -> str | None:
        # Without the age: the sentence becomes part of reasons that are written only where they change.
        return f"no report for more than {self._stale_after_s:g} s" if is_stale else None
