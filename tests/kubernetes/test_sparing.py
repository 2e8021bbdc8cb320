"""Reports of a cluster: only what is due is sent, and the answer is whole all the same."""

from __future__ import annotations

import pytest

from airflow_gpu_provider.exceptions import BrokerUnavailable
from airflow_gpu_provider.kubernetes.sparing import SparingReports
from airflow_gpu_provider.reports import DeviceReport, LeasedDevice, NodeReport, ReportAnswer, ReportBody


def node(name: str, *, suspect: str | None = None) -> NodeReport:
    device = DeviceReport(id=f"GPU-{name}", model="A100", memory_mib=1, tflops=35, suspect=suspect)
    return NodeReport(name=name, host=name, cpu_cores=1, memory_mib=1, devices=(device,))


class Broker:
    """Remembers what it was sent; answers the leases of those devices only, as the real one does."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        self.leases: dict[str, str] = {}
        self.is_away = False

    def __call__(self, body: ReportBody) -> ReportAnswer:
        if self.is_away:
            raise BrokerUnavailable("away")
        self.sent.append([each.name for each in body.nodes])
        ids = [device.id for each in body.nodes for device in each.devices]
        leased = [LeasedDevice(id=each, lease_id=self.leases[each]) for each in ids if each in self.leases]
        return ReportAnswer(leased=leased, report_interval_s=1.0)


class Clock:
    """Time that passes only when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def body(*nodes: NodeReport) -> ReportBody:
    return ReportBody(nodes=nodes)


def test_a_node_is_sent_when_it_changed_and_before_it_would_seem_silent() -> None:
    broker, clock = Broker(), Clock()
    send = SparingReports(broker, every_s=3, clock=clock)
    send(body(node("a"), node("b")))
    clock.now = 1
    send(body(node("a"), node("b", suspect="XID 79")))
    clock.now = 3
    send(body(node("a"), node("b", suspect="XID 79")))
    clock.now = 4
    send(body(node("a"), node("b", suspect="XID 79")))
    assert broker.sent == [["a", "b"], ["b"], ["a"], ["b"]]


def test_the_answer_names_the_leases_of_nodes_that_were_not_sent() -> None:
    broker, clock = Broker(), Clock()
    send = SparingReports(broker, every_s=3, clock=clock)
    broker.leases = {"GPU-a": "l1"}
    send(body(node("a"), node("b")))
    broker.leases = {"GPU-a": "l1", "GPU-b": "l2"}
    told = send(body(node("a"), node("b", suspect="XID 79"))).leased
    assert {each.id: each.lease_id for each in told} == {"GPU-a": "l1", "GPU-b": "l2"}
    broker.leases, clock.now = {}, 3
    assert send(body(node("a"), node("b", suspect="XID 79"))).leased == []


def test_what_the_broker_did_not_take_is_sent_again() -> None:
    broker = Broker()
    send = SparingReports(broker, clock=Clock())
    broker.is_away = True
    with pytest.raises(BrokerUnavailable):
        send(body(node("a")))
    broker.is_away = False
    send(body(node("a")))
    assert broker.sent == [["a"]]


def test_a_node_that_left_and_comes_back_is_sent() -> None:
    broker = Broker()
    send = SparingReports(broker, clock=Clock())
    send(body(node("a"), node("b")))
    send(body(node("a")))
    send(body(node("a"), node("b")))
    assert broker.sent == [["a", "b"], [], ["b"]]
