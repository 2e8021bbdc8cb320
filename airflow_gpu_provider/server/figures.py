"""The figures of the whole broker, for pages that ask each second.

Which devices are in service is worked out once for each version of the fleet and of the drains; a lease costs
one look-up. No row of a node, device or claim is made. The next step is `views.status`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_gpu_provider.broker.model import WHOLE_DEVICE
from airflow_gpu_provider.store.figures import Held, held

if TYPE_CHECKING:
    from airflow_gpu_provider.server.broker import Broker


@dataclass(frozen=True, slots=True)
class _Service:
    """What is reported, and which devices are in service, of one version of the fleet and the drains."""

    version: tuple[int, int]
    nodes: int
    devices: int
    offered: frozenset[str]


@dataclass(frozen=True, slots=True)
class Totals:
    """The figures of a moment."""

    nodes: int
    devices: int
    free: float  #: whole devices and the free parts of shared ones
    pending: int
    leases: int


class Figures:
    """Counts what this replica knows."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._cached = _Service((-1, -1), 0, 0, frozenset())

    def totals(self) -> Totals:
        """Return the figures of now."""
        service, found = self._service(), self._held()
        taken = sum(milli for device, milli in found.shares if device in service.offered)
        free = len(service.offered) - taken / WHOLE_DEVICE
        return Totals(service.nodes, service.devices, round(free, 3), found.pending, found.leases)

    def _service(self) -> _Service:
        broker, now = self._broker, self._broker.clock()
        broker.mirror.age(now)
        version = (broker.mirror.version, broker.drains.version)
        if self._cached.version != version:
            nodes, devices = broker.mirror.size()
            offered = frozenset(
                device.id
                for node in broker.fleet(now).nodes
                if not node.unavailable
                for device in node.devices
                if not device.unavailable
            )
            self._cached = _Service(version, nodes, devices, offered)
        return self._cached

    def _held(self) -> Held:
        desk = self._broker.desk
        if not desk.is_open:
            return held(self._broker.engine)
        pending, leases = 0, 0
        shares: list[tuple[str, int]] = []
        for entry in list(desk.board.entries.values()):
            if (lease := entry.held) is None:
                pending += 1
            else:
                leases += 1
                shares += lease.parts if lease.offer is None else lease.taken().items()
        return Held(pending, leases, shares)
