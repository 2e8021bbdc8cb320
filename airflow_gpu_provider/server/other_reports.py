"""What agents told other replicas: read where it is new, and only noted as alive where it is not.

A report is some 18 KiB of the tables' text once its node knows its peers, so a thousand of them read once a
second would cost a replica a third of a core. The next step is `fleet`.
"""

from __future__ import annotations

from airflow_gpu_provider.server.fleet import FleetMirror
from airflow_gpu_provider.store.nodes import NodeStore


def take_in(mirror: FleetMirror, nodes: NodeStore) -> None:
    """Let the mirror know of all that the tables have of other replicas' nodes."""
    mirror.merge(nodes.load(mirror.unread(nodes.glance())))
