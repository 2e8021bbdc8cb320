"""Pods that outlived their lease end, and nobody else's do."""

from __future__ import annotations

from airflow_gpu_provider.kubernetes.leftovers import PodLeftovers, ender
from airflow_gpu_provider.kubernetes.mirror import ClusterMirror
from airflow_gpu_provider.kubernetes.names import LEASE_LABEL
from airflow_gpu_provider.kubernetes.pods import PodUse, pod_use
from airflow_gpu_provider.reports import NodeReport
from tests.kubernetes.builders import gpu_node, pod
from tests.kubernetes.imitation import Imitation

LIVE = {"slot": frozenset({"live"})}
REPORTED = (
    NodeReport(name="prod/gpu-0", host="prod/gpu-0", cpu_cores=8, memory_mib=1024, devices=(), labels={}),
)


class Watched:
    """A cluster with a pod for each lease (None = of someone else), and what was ended there."""

    def __init__(self, *leases: str | None, grace_s: float = 30) -> None:
        self.mirror = ClusterMirror()
        for number, lease in enumerate(leases):
            self.mirror.put_pod(use(number, lease), ("ns", str(number)))
        self.ended: list[str] = []
        self.leftovers = PodLeftovers({"prod": (self.mirror, self._end)}, grace_s=grace_s)

    def _end(self, lease: str, namespace: str) -> None:
        self.ended.append(f"{namespace}/{lease}")

    def at(
        self, *seconds: float, answered: bool = True, nodes: tuple[NodeReport, ...] = REPORTED
    ) -> list[str]:
        for now in seconds:
            self.leftovers.strike_out_holders(nodes, now)
            if answered:
                self.leftovers.learn(LIVE if nodes else {}, now)
        self.leftovers.strike_out_holders(nodes, seconds[-1])
        return self.ended


def use(number: int, lease: str | None) -> PodUse | None:
    labels = {LEASE_LABEL: lease} if lease else {}
    body = pod(str(number), node="gpu-0", labels=labels)
    body["metadata"]["namespace"] = "ns"
    return pod_use({**body, "status": {"phase": "Running"}})


def test_what_is_without_a_live_lease_ends_after_its_grace_and_nothing_else() -> None:
    watched = Watched("live", "over", None)
    assert watched.at(0, 10, 29) == []
    assert watched.at(30) == ["ns/over"]
    assert watched.at(31, 40) == ["ns/over"], "once, and again only much later"
    assert watched.at(91) == ["ns/over"] * 2


def test_nobody_is_condemned_while_the_broker_is_silent() -> None:
    watched = Watched("over")
    assert watched.at(0, 1000, answered=False) == []
    assert watched.at(1000, 1001) == []
    assert watched.at(1010, 5000, answered=False) == []


def test_nobody_is_condemned_while_his_node_is_not_reported() -> None:
    watched = Watched("live")
    assert watched.at(0) == []
    assert watched.at(10, 1000, nodes=()) == [], "the broker answers for the nodes of a report only"
    assert watched.at(1001, 1020) == []


def test_a_pod_whose_lease_is_known_late_is_let_alone() -> None:
    watched = Watched("late")
    assert watched.at(0, 20) == []
    watched.leftovers.learn({"slot": frozenset({"late"})}, 25)
    watched.leftovers.strike_out_holders(REPORTED, 25)
    assert watched.at(40, 60) == [], "its time begins anew"


def test_the_pods_of_a_lease_and_their_service_are_deleted(cluster: Imitation) -> None:
    from kubernetes import client

    labels = {LEASE_LABEL: "over"}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "gpu-over", "labels": labels},
               "spec": {"clusterIP": "None", "ports": [{"port": 1}]}}  # fmt: skip
    cluster.create(gpu_node(), pod("ours", gpus=1, labels=labels), pod("stranger"), service)
    ender(client.ApiClient(client.Configuration(host=cluster.url)))("over", "default")
    cluster.wait_for(lambda: len(cluster.all("pods")) == 1, "it is gone")
    assert cluster.pod("stranger") is not None
    assert cluster.all("services") == []
