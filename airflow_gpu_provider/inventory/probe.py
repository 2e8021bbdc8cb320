"""The seam between measuring devices and everything else.

A probe reads; it never decides, waits or talks to the broker. It must answer within a fraction of a second,
report every device it knows whether leased or not, and say ``None`` for what it cannot measure.
`agent.Agent` calls it once a second, tells holders from outsiders and sends the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from airflow_gpu_provider.reports import NodeReport

#: device id -> its live leases (several share a device), as the broker last answered
Leases = Mapping[str, frozenset[str]]
NO_LEASES: Leases = MappingProxyType({})


class Probe(Protocol):
    """Something that can measure nodes."""

    def read(self, leases: Leases = NO_LEASES) -> tuple[NodeReport, ...]:
        """Measure now.

        ``foreign_pids`` of a probe's report names *every* process that computes on the device: the probe
        cannot know whose they are. ``leases`` lets a simulated device look busy while it is leased; a real
        one is measured and needs no such hint.
        """
        ...
