"""The latency from a shard to the others of its generation, measured while it trains.

On the address that the collectives use, so it is real also between namespaces of one host. The shards tell
their addresses when they join, and their estimates go to the supervisor with the pulse. Next:
`network_watch`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence

from airflow_gpu_provider.echo import written_address
from airflow_gpu_provider.latency import Latency
from airflow_gpu_provider.training.pulse import Pulse

#: Members that are asked, to either side in the ring: the hops matter, and what might replace them.
_REACH = 8

log = logging.getLogger(__name__)


class ShardEcho:
    """The latencies of one shard. Start it from the thread whose network is meant."""

    def __init__(self, uid: str, pulse: Pulse, secret: str) -> None:
        self._uid = uid
        self._pulse = pulse
        self._key = hashlib.sha256(secret.encode()).digest()
        self._latency: Latency | None = None
        self._posted: dict[str, float | None] = {}
        self._next: str | None = None
        self.address = ""  #: where others ask this shard; "" = it is not measured

    def start(self, host: str) -> None:
        """Begin to answer on this address, once. A run goes on without."""
        if self._latency is not None:
            return
        try:
            self._latency = Latency(self._key, host=host, on_round=self._post)
        except OSError as error:
            log.warning("The latency between shards is not measured: %s: %s", host, error)
            return
        self.address = written_address(host, self._latency.port)
        self._latency.start()

    def ask(self, addresses: Mapping[str, str], ring: Sequence[str]) -> None:
        """Measure these shards from now on, those near it in the ring of all members."""
        if self._latency is None:
            return
        place = ring.index(self._uid)
        self._next = ring[(place + 1) % len(ring)]
        near = {ring[(place + step) % len(ring)] for step in range(-_REACH, _REACH + 1)} - {self._uid}
        self._latency.ask({uid: at for uid in near if (at := addresses.get(uid))}, self._key)

    def to_next(self) -> float | None:
        """Return the latency to the next shard of the ring, None while it is not measured."""
        return self._posted.get(self._next or "")

    def _post(self) -> None:
        """Tell the supervisor what changed; called twice a second by the thread that measures."""
        assert self._latency is not None
        known = {
            uid: None if each.latency_ms is None else float(f"{each.latency_ms:.3g}")
            for uid, each in self._latency.estimates().items()
        }
        if known != self._posted:
            self._posted = known
            self._pulse.post(f"latency/{self._uid}", dict(known))
