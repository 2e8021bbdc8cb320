"""A cluster as the broker hears of it: from the API server and DCGM exporters to reports and leases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from airflow_gpu_provider.kubernetes.metrics import Metrics
from airflow_gpu_provider.kubernetes.probe import ClusterProbe, ClusterProbes
from airflow_gpu_provider.reports import NodeReport
from tests.kubernetes.builders import gpu_node, pod
from tests.kubernetes.imitation import Fate, Imitation
from tests.kubernetes.test_watch import client_of

Probing = Callable[..., ClusterProbe]


@pytest.fixture
def probing(cluster: Imitation) -> Iterator[Probing]:
    started: list[ClusterProbe] = []

    def start(name: str = "prod", **more: Any) -> ClusterProbe:
        probe = ClusterProbe(name, client_of(cluster), **more)
        probe.start()
        started.append(probe)
        assert probe.wait_listed(10)
        return probe

    yield start
    for probe in started:
        probe.stop()


METRICS = (
    'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",Hostname="gpu-0"} 50\n'
    'DCGM_FI_DEV_XID_ERRORS{gpu="1",UUID="GPU-b",Hostname="gpu-0"} 48\n'
)


class Exporter(BaseHTTPRequestHandler):
    """Answers as an exporter does, and as a Prometheus that has asked it."""

    def do_GET(self) -> None:
        is_known = self.path == "/metrics" or self.path.startswith("/federate?match%5B%5D=%7B__name__")
        self.send_response(200 if is_known else 404)
        self.end_headers()
        self.wfile.write(METRICS.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def exporter() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Exporter) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def open_devices(node: NodeReport) -> int:
    return sum(not (device.suspect or device.unavailable) for device in node.devices)


def until_open(cluster: Imitation, probe: ClusterProbe, count: int) -> None:
    cluster.wait_for(lambda: sum(map(open_devices, probe.read())) == count, f"{count} open devices")


def test_pods_of_others_take_slots_and_give_them_back(cluster: Imitation, probing: Probing) -> None:
    cluster.create(gpu_node("gpu-0"), gpu_node("cpu-0", resources={}))
    probe = probing()
    [node] = probe.read()
    assert (node.name, node.host, node.labels["kubernetes-cluster"]) == ("prod/gpu-0", "prod/gpu-0", "prod")
    cluster.kubelet.fates["short"] = Fate(runs_s=0.3)
    cluster.create(pod("notebook", gpus=3, cpu="8"), pod("short", gpus=1), namespace="default")
    until_open(cluster, probe, 5)
    [node] = probe.read()
    assert (node.cpu_cores, node.devices[7].unavailable) == (
        56,
        "used by pods outside the broker: default/notebook",
    )
    cluster.delete("pods", "notebook", gracePeriodSeconds=0)
    until_open(cluster, probe, 8)


def test_a_cordoned_or_lost_node_is_closed_and_one_that_is_deleted_leaves(
    cluster: Imitation, probing: Probing
) -> None:
    cluster.create(gpu_node("gpu-0", gpus=2), gpu_node("gpu-1", gpus=2))
    probe = probing()
    cluster.change("nodes", "gpu-0", lambda node: {**node, "spec": {"unschedulable": True}})
    cluster.lose_node("gpu-1")
    until_open(cluster, probe, 0)
    first, second = probe.read()
    assert "cordoned" in str(first.devices[0].unavailable)
    assert "NodeStatusUnknown" in str(second.devices[0].unavailable)
    assert not any(device.suspect for device in (*first.devices, *second.devices))
    cluster.delete("nodes", "gpu-1")
    cluster.wait_for(lambda: [node.name for node in probe.read()] == ["prod/gpu-0"], "the node has left")


def test_who_may_see_one_namespace_only_counts_that(cluster: Imitation, probing: Probing) -> None:
    cluster.create(gpu_node(), pod("mine", gpus=1), pod("theirs", gpus=4, node="gpu-0"), namespace="default")
    cluster.create(pod("elsewhere", gpus=2), namespace="other")
    probe = probing(namespaces=["other"])
    until_open(cluster, probe, 6)
    assert not cluster.requests("/api/v1/pods")


def test_nothing_is_reported_of_a_cluster_that_was_not_heard_of(cluster: Imitation, probing: Probing) -> None:
    cluster.create(gpu_node())
    probe = probing(grace_s=0.2)
    assert len(probe.read()) == 1
    cluster.stop_listening()
    cluster.wait_for(lambda: probe.read() == (), "the cluster is silent")
    cluster.listen_again()
    cluster.wait_for(lambda: len(probe.read()) == 1, "it is back")


def test_several_clusters_may_call_their_nodes_alike(cluster: Imitation, probing: Probing) -> None:
    cluster.create(gpu_node(gpus=1))
    nodes = ClusterProbes([probing("east"), probing("west")]).read()
    assert [node.name for node in nodes] == ["east/gpu-0", "west/gpu-0"]
    assert nodes[0].devices[0].id != nodes[1].devices[0].id


def test_nothing_is_polled(cluster: Imitation, probing: Probing) -> None:
    cluster.create(gpu_node())
    probe = probing()
    cluster.wait_for(lambda: cluster.api.watches.open == 2, "both watches")
    before = cluster.requests()
    for number in range(20):
        cluster.create(pod(f"pod-{number}", gpus=0, node="gpu-0"))
        probe.read()
    assert cluster.requests() == before


def test_a_report_is_made_anew_only_where_something_changed(cluster: Imitation, probing: Probing) -> None:
    cluster.create(gpu_node("gpu-0"), gpu_node("gpu-1"))
    probe = probing()
    before = probe.read()
    cluster.create(pod("one", gpus=1, node="gpu-1"))
    until_open(cluster, probe, 15)
    after = probe.read()
    assert after[0] is before[0] and after[1] is not before[1]


@pytest.mark.parametrize("by_prometheus", [False, True])
def test_what_was_measured_is_shown_with_the_slots(
    cluster: Imitation, probing: Probing, exporter: ThreadingHTTPServer, by_prometheus: bool
) -> None:
    exporter_pod = pod("dcgm", node="gpu-0", labels={"app": "nvidia-dcgm-exporter"})
    cluster.create(gpu_node("gpu-0", gpus=2), exporter_pod)
    cluster.wait_for(
        lambda: (cluster.pod("dcgm") or {})["status"].get("podIP"), "the exporter has an address"
    )
    cluster.change("pods", "dcgm", lambda each: {**each, "status": {**each["status"], "podIP": "127.0.0.1"}})
    port = exporter.server_address[1]
    more = {"prometheus": f"http://127.0.0.1:{port}/"} if by_prometheus else {"port": port}
    probe = probing(metrics=lambda mirror: Metrics(mirror, every_s=0.1, **more))
    cluster.wait_for(lambda: any(device.suspect for device in probe.read()[0].devices), "the error is seen")
    first, second = probe.read()[0].devices
    assert (first.utilisation, first.suspect) == (0.5, None)
    assert str(second.suspect).startswith("XID 48") and second.utilisation is None
