"""What the agent measures to other hosts, and what of it is news to the broker.

The broker says whom to ask (`broker.peers`); `latency` asks. A latency is told when it is known, and again
when it has clearly changed: what varies from one measurement to the next is no news. A peer that does not
answer is told as such and named in the log once. The agent measures its devices whether this works or not.
"""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from airflow_gpu_provider.echo import checked_address, local_address_towards, written_address
from airflow_gpu_provider.latency import Estimate, Latency
from airflow_gpu_provider.reports import NodeReport, ReportAnswer

#: The port that answers unless `--latency-port` names another.
USUAL_PORT = 9339
#: A change is news from here on: both as a part and in milliseconds.
_NEWS_SHARE = 0.25
_NEWS_MS = 0.1
_NEWS_LOSS = 0.2

log = logging.getLogger(__name__)


class Neighbours:
    """The peers of this host."""

    def __init__(self, latency: Latency | None = None, *, address: str | None = None) -> None:
        """Without ``latency`` nothing is measured; ``address`` is where others reach it."""
        self._latency = latency
        self._at = None if latency is None or address is None else written_address(address, latency.port)
        self._told: dict[str, Estimate] = {}
        self._telling: dict[str, Estimate] = {}
        self._silent: set[str] = set()
        self.plan = ""  #: the peers that the broker named last, as it calls them

    def added_to(self, node: NodeReport) -> NodeReport:
        """Return a report with where this host answers and what is new."""
        if self._latency is None:
            return node
        news = self._telling
        return node.model_copy(
            update={
                "echo_at": self._at,
                "latency_ms": {name: _rounded(each.latency_ms) for name, each in news.items()},
                "loss": {name: round(each.loss, 2) for name, each in news.items() if each.loss},
            }
        )

    def measure(self) -> None:
        """Find out what is news."""
        if self._latency is None:
            return
        known = self._latency.estimates()
        self._telling = {name: each for name, each in known.items() if _is_news(self._told.get(name), each)}
        for name, each in self._telling.items():
            self._log(name, each)

    def told(self) -> None:
        """Note that the broker has heard of the last news."""
        self._told.update(self._telling)
        self._telling = {}

    def learn(self, answer: ReportAnswer) -> None:
        """Ask those whom the broker names from now on; None = as before."""
        if self._latency is None or answer.peers is None:
            return
        self.plan = answer.peer_plan
        self._latency.ask(answer.peers, bytes.fromhex(answer.echo_key))
        # Whoever comes back in a later round is told again: another replica may not have heard of it.
        self._told = {name: each for name, each in self._told.items() if name in answer.peers}

    def _log(self, name: str, estimate: Estimate) -> None:
        if estimate.latency_ms is None and name not in self._silent:
            self._silent.add(name)
            log.warning(
                "Node %s does not answer: its latency is not measured. Is UDP port %s open between the "
                "hosts, and --latency-address one that others reach?",
                name,
                self._at.rpartition(":")[2] if self._at else "?",
            )
        elif estimate.latency_ms is not None and name in self._silent:
            self._silent.discard(name)
            log.info("Node %s answers: %.2f ms", name, estimate.latency_ms)


def measured_on(port: int, *, address: str | None, broker_url: str | None) -> Neighbours:
    """Return neighbours that are measured from this port, none where that cannot be: devices matter more."""
    parts = urlsplit(broker_url or "")
    if not port or parts.hostname is None:
        return Neighbours()
    own = address or local_address_towards(parts.hostname, parts.port or 80)
    if own is None:
        log.warning("No latency is measured: there is no way to %s; give --latency-address", parts.hostname)
        return Neighbours()
    try:
        checked_address(written_address(own, port))
    except ValueError as wrong:
        log.warning("No latency is measured: %s, or give --latency-address", wrong)
        return Neighbours()
    try:
        latency = Latency(port=port)
    except OSError as error:
        log.warning(
            "No latency is measured: UDP port %d cannot be used: %s; give another --latency-port, 0 for none",
            port,
            error.strerror,
        )
        return Neighbours()
    latency.start()
    return Neighbours(latency, address=own)


def _is_news(told: Estimate | None, now: Estimate) -> bool:
    if told is None or (told.latency_ms is None) != (now.latency_ms is None):
        return True
    if abs(now.loss - told.loss) >= _NEWS_LOSS:
        return True
    if told.latency_ms is None or now.latency_ms is None:
        return False
    change = abs(now.latency_ms - told.latency_ms)
    return change > max(_NEWS_MS, _NEWS_SHARE * told.latency_ms)


def _rounded(latency_ms: float | None) -> float | None:
    return None if latency_ms is None else float(f"{latency_ms:.2g}")
