"""What agents have measured to one another, by node: their reports bring the news only.

Bounded, and shared where it can be: a thousand nodes that all know one another are a million entries. What
is new reaches placements `_APPLY_S` later at most, and the database after `_SAVE_S`, because in the first
rounds every report has news, and none of it is urgent. Used by `fleet.FleetMirror` under its lock.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

from airflow_gpu_provider.broker.model import NodeName
from airflow_gpu_provider.reports import MOST_LATENCIES, NodeReport

_APPLY_S = 5.0
_SAVE_S = 30.0


class Latencies:
    """The newest latency of each pair, as the first of it measured it."""

    def __init__(self) -> None:
        self._ms: dict[str, dict[NodeName, float]] = {}
        self._loss: dict[str, dict[str, float]] = {}
        self._stored: dict[str, int] = {}  #: by node, a digest of what the database said last
        self._values: dict[float, float] = {}  #: each is kept once: they have two digits
        self._unapplied: set[str] = set()
        self._unsaved: set[str] = set()
        self._apply_at: datetime | None = None
        self._save_at: datetime | None = None

    def take(self, report: NodeReport, now: datetime, *, is_own: bool = True) -> None:
        """Take the news of a report; with ``is_own`` False it comes from the database."""
        if not report.latency_ms:
            return
        if not is_own and self._is_old_news(report):
            return
        known = self._ms.setdefault(report.name, {})
        changed = False
        for name, latency in report.latency_ms.items():
            changed |= self._set(known, NodeName(sys.intern(name)), latency)
            if report.loss or report.name in self._loss:
                self._set_loss(report, name)
        if not changed:
            return
        self._unapplied.add(report.name)
        self._apply_at = self._apply_at or now + timedelta(seconds=_APPLY_S)
        if is_own:
            self._unsaved.add(report.name)
            self._save_at = self._save_at or now + timedelta(seconds=_SAVE_S)

    def of(self, node: str) -> Mapping[NodeName, float]:
        """Return what a node has measured, without those that did not answer."""
        return dict(self._ms.get(node, {}))

    def loss_of(self, node: str) -> Mapping[str, float]:
        """Return the share of lost questions, of those nodes to which any was lost."""
        return dict(self._loss.get(node, {}))

    def among(self, nodes: Collection[str]) -> dict[str, dict[str, float]]:
        """Return what each of these nodes has measured of the others."""
        if len(nodes) < 2:
            return {}
        known = {node: self._ms.get(node, {}) for node in nodes}
        return {
            node: {str(name): ms for name, ms in row.items() if name in known} for node, row in known.items()
        }

    def to_apply(self, now: datetime) -> set[str]:
        """Return the nodes whose latencies a placement does not know yet, when it is time."""
        if self._apply_at is None or now < self._apply_at:
            return set()
        due, self._unapplied, self._apply_at = self._unapplied, set(), None
        return due

    def to_save(self, now: datetime) -> set[str]:
        """Return the nodes whose latencies the database does not know yet, when it is time."""
        if self._save_at is None or now < self._save_at:
            return set()
        due, self._unsaved, self._save_at = self._unsaved, set(), None
        return due

    def forget(self, node: str) -> None:
        """Drop a node that left the fleet, and what others have measured to it."""
        for rows in (self._ms, self._loss, self._stored):
            rows.pop(node, None)
        for row in self._ms.values():
            row.pop(NodeName(node), None)
        for losses in self._loss.values():
            losses.pop(node, None)

    def _is_old_news(self, report: NodeReport) -> bool:
        """Say whether the database said the same before: it is read every second, and tells everything."""
        digest = hash((frozenset(report.latency_ms.items()), frozenset(report.loss.items())))
        is_old = self._stored.get(report.name) == digest
        self._stored[report.name] = digest
        return is_old

    def _set(self, known: dict[NodeName, float], name: NodeName, latency: float | None) -> bool:
        if latency is None:
            return known.pop(name, None) is not None
        # In two digits: what varies from one measurement to the next is no news.
        latency = float(f"{latency:.2g}")
        if known.get(name) == latency:
            return False
        known.pop(name, None)  # the newest is last
        known[name] = self._values.setdefault(latency, latency)
        if len(known) > MOST_LATENCIES:
            del known[next(iter(known))]
        return True

    def _set_loss(self, report: NodeReport, name: str) -> None:
        losses = self._loss.setdefault(report.name, {})
        if name in report.loss:
            losses.pop(name, None)  # the newest is last
            losses[name] = report.loss[name]
            if len(losses) > MOST_LATENCIES:
                del losses[next(iter(losses))]
        else:
            losses.pop(name, None)
