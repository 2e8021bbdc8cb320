"""End pods that outlived their lease: their task was killed, and no later try has taken them over.

What `inventory.leftovers` does for processes of a host, asked for by `--end-leftovers`. Only pods that carry
a lease of ours are touched, and only once the broker has answered for `GRACE_S` that it knows no such lease:
while it is silent nobody is condemned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from airflow_gpu_provider.inventory.leftovers import Leftovers
from airflow_gpu_provider.inventory.probe import NO_LEASES, Leases
from airflow_gpu_provider.kubernetes.mirror import ClusterMirror
from airflow_gpu_provider.kubernetes.names import LEASE_LABEL, node_name
from airflow_gpu_provider.reports import NodeReport

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

#: As long as a lease lives without being renewed, so that the next try has the time to take over its pods.
GRACE_S = 60.0
#: from SIGTERM to SIGKILL
_STOP_S = 10
_AGAIN_S = 60.0
_PATIENCE_S = (5, 30)  #: to connect, and to wait for the answer

log = logging.getLogger(__name__)

#: Deletes what runs under a lease in a namespace.
End = Callable[[str, str], None]


class PodLeftovers(Leftovers):
    """Watches which pods of clusters are without a live lease."""

    def __init__(
        self, clusters: Mapping[str, tuple[ClusterMirror, End]], *, grace_s: float = GRACE_S
    ) -> None:
        """Watch these, by name."""
        super().__init__()
        self._clusters = clusters
        self._grace_s = grace_s
        self._live: frozenset[str] = frozenset()
        self._answered_at: float | None = None
        self._since: dict[tuple[str, str], float] = {}

    def learn(self, leases: Leases = NO_LEASES, now: float = 0.0) -> None:
        """Take over what the broker answered."""
        self._live = frozenset(lease for held in leases.values() for lease in held)
        self._answered_at = now

    def strike_out_holders(self, nodes: tuple[NodeReport, ...], now: float) -> tuple[NodeReport, ...]:
        """Return the reports as they are; end what is left over on the way."""
        if self._answered_at is None:
            return nodes
        # What was not reported was not answered for: a lease on it may live although nobody named it.
        reported = {node.name for node in nodes}
        found = {
            (pod.lease, pod.name[0]): end
            for name, (mirror, end) in self._clusters.items()
            for pod in mirror.leased_pods()
            if pod.lease and pod.lease not in self._live and node_name(name, pod.node) in reported
        }
        self._since = {key: self._since.get(key, self._answered_at) for key in found}
        for key, since in list(self._since.items()):
            if self._answered_at - since >= self._grace_s:
                self._end_pods(*key, found[key])
                self._since[key] = self._answered_at + _AGAIN_S - self._grace_s
        return nodes

    def _end_pods(self, lease: str, namespace: str, end: End) -> None:
        log.warning("Ending the pods of lease %s in namespace %s: it is over", lease, namespace)
        try:
            end(lease, namespace)
        except Exception as error:  # whatever a cluster answers, its inventory must go on
            log.error("They could not be ended, trying again in %g s: %s", _AGAIN_S, error)


def ender(client: ApiClient) -> End:
    """Return what deletes the pods of a lease and their service."""
    from kubernetes.client import CoreV1Api

    core = CoreV1Api(client)

    def end(lease: str, namespace: str) -> None:
        label = f"{LEASE_LABEL}={lease}"
        # Bounded: the agent reports nothing while it waits.
        core.delete_collection_namespaced_pod(
            namespace, label_selector=label, grace_period_seconds=_STOP_S, _request_timeout=_PATIENCE_S
        )
        core.delete_collection_namespaced_service(
            namespace, label_selector=label, _request_timeout=_PATIENCE_S
        )

    return end
