"""Whom each agent has to measure: a few peers in each round, and always the nodes that share a gang with it.

Every replica counts the rounds by the time of day, so both nodes of a pair ask in the same round, whichever
replica they report to. An agent is told its peers only when they are others than those it names. The next
step is `inventory.neighbours`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from airflow_gpu_provider.broker.peers import Peers, of_gang
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.auth import echo_key
from airflow_gpu_provider.server.fleet import FleetMirror

#: Long enough for an estimate: an agent asks twice a second.
ROUND_S = 6.0


class News(NamedTuple):
    """What an agent is told of whom to measure, as `ReportAnswer` has it."""

    peers: dict[str, str] | None
    peer_plan: str
    echo_key: str


_NONE = News(None, "", "")


class Probing:
    """Who asks whom, as this replica knows the fleet."""

    def __init__(self, mirror: FleetMirror, signing_key: str) -> None:
        self._mirror = mirror
        self._key = echo_key(signing_key)
        self._version = self._round = -1
        self._peers = Peers(())
        self._plans: dict[Hashable, tuple[dict[str, str], str]] = {}  #: of this round

    def news(self, body: ReportBody, gangs: Iterable[tuple[str, ...]], now: datetime) -> News:
        """Return the peers of the reporting host, where they are news to it.

        ``gangs`` are the nodes of each lease that holds one of its devices.
        """
        own = {node.name: node.echo_at for node in body.nodes if node.echo_at is not None}
        if not own:
            return _NONE
        self._turn(int(now.timestamp() // ROUND_S))
        shared = frozenset(gang for gang in gangs if len(gang) > 1)
        key = (tuple(own.items()), shared)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = self._plan(own, shared)
        peers, plan = found
        return News(None, plan, "") if plan == body.peer_plan else News(peers, plan, self._key)

    def _turn(self, number: int) -> None:
        """Begin another round: the one moment when new nodes are taken in, because that sorts all of them."""
        if number == self._round:
            return
        self._round = number
        self._plans = {}
        if self._version != self._mirror.stations_version:
            self._version = self._mirror.stations_version
            self._peers = Peers(self._mirror.stations())

    def _plan(self, own: Mapping[str, str], gangs: frozenset[tuple[str, ...]]) -> tuple[dict[str, str], str]:
        names: set[str] = set()
        for name in own:
            names |= self._peers.of(name, self._round)
            for gang in gangs:
                names |= of_gang(gang, name) if name in gang else set()
        addresses, here = self._mirror.addresses, frozenset(own.values())
        peers = {
            name: at for name in sorted(names) if (at := addresses.get(name)) is not None and at not in here
        }
        return peers, hashlib.blake2b(repr(peers).encode(), digest_size=12).hexdigest()
