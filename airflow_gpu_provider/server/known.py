"""A node as this replica knows it: its newest report, what was derived from that, and what the tables have.

Used by `fleet`, under its lock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime

from airflow_gpu_provider.broker.model import Node
from airflow_gpu_provider.store.nodes import StoredNode


@dataclass(slots=True)
class Known:
    """A node with what was derived from its newest report."""

    stored: StoredNode
    facts: tuple[object, ...]
    node: Node
    owns_all: bool  #: its devices belong to it: nobody takes them while it reports the same
    is_stale: bool = False
    saved_facts: tuple[object, ...] | None = None
    saved_at: datetime | None = None

    def unsaved_s(self) -> float:
        """Return for how long the tables have not heard that it is alive."""
        if self.saved_at is None:
            return math.inf
        return (self.stored.reported_at - self.saved_at).total_seconds()
