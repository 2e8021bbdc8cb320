"""What the agent tells the broker of the latency to others, and what the broker asks it to measure."""

from __future__ import annotations

import logging
from datetime import datetime, timezone

import pytest

from airflow_gpu_provider.inventory.neighbours import Neighbours, measured_on
from airflow_gpu_provider.latency import Estimate
from airflow_gpu_provider.reports import NodeReport, ReportAnswer, ReportBody
from airflow_gpu_provider.server.fleet import FleetMirror
from airflow_gpu_provider.server.probing import Probing

NODE = NodeReport(name="n1", host="n1", cpu_cores=1, memory_mib=1)
NOW = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)


class FakeLatency:
    port = 9339

    def __init__(self) -> None:
        self.known: dict[str, Estimate] = {}
        self.asked: dict[str, str] = {}

    def ask(self, peers: dict[str, str], key: bytes) -> None:
        self.asked = peers

    def estimates(self) -> dict[str, Estimate]:
        return self.known


def told(neighbours: Neighbours) -> dict[str, float | None]:
    neighbours.measure()
    found = neighbours.added_to(NODE)
    neighbours.told()
    return dict(found.latency_ms)


def test_only_what_is_new_is_told_and_a_silent_peer_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    latency = FakeLatency()
    neighbours = Neighbours(latency, address="fd00::1")  # type: ignore[arg-type]
    neighbours.learn(
        ReportAnswer(peers={"n2": "10.0.0.2:9339", "n3": "10.0.0.3:9339"}, peer_plan="p", echo_key="00")
    )
    assert (neighbours.plan, told(neighbours)) == ("p", {}), "not measured is not 0"
    with caplog.at_level(logging.INFO):
        latency.known = {"n2": Estimate(0.2134, 0.0), "n3": Estimate(None, 1.0)}
        assert told(neighbours) == {"n2": 0.21, "n3": None}
        latency.known["n2"] = Estimate(0.27, 0.0)
        assert told(neighbours) == {} and neighbours.added_to(NODE).echo_at == "[fd00::1]:9339"
        latency.known["n2"] = Estimate(0.4, 0.5)
        neighbours.measure()
        news = neighbours.added_to(NODE)
        assert (news.latency_ms, news.loss) == ({"n2": 0.4}, {"n2": 0.5})
        assert told(neighbours) == {"n2": 0.4}, "told again until the broker has heard of it"
        latency.known["n3"] = Estimate(3.0, 0.0)
        assert told(neighbours) == {"n3": 3.0}
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "Node n3 does not answer",
        "Node n3 answers",
    ]
    neighbours.learn(ReportAnswer(peers={"n2": "10.0.0.2:9339"}, echo_key="00"))
    neighbours.learn(ReportAnswer(peers=dict.fromkeys(("n2", "n3"), "10.0.0.2:9339"), echo_key="00"))
    assert told(neighbours) == {"n3": 3.0}, "told anew in each round: another replica may not know it"


def test_the_broker_names_peers_of_other_hosts_once_and_those_of_a_gang_always() -> None:
    fleet = FleetMirror(stale_after_s=10, forget_after_s=3600, max_load=0.5)
    probing = Probing(fleet, "key")
    nodes = [
        NODE.model_copy(update={"name": f"n{at}", "echo_at": f"10.0.0.{at}:9339", "labels": {"zone": zone}})
        for at, zone in ((1, "a"), (2, "a"), (3, "b"))
    ]
    beside = nodes[0].model_copy(update={"name": "n1b"})  # another node of the same host
    fleet.fold([*nodes, beside], NOW)
    body = ReportBody(nodes=(nodes[0], beside))
    answer = probing.news(body, [], NOW)
    assert answer.peers == {"n2": "10.0.0.2:9339"} and len(bytes.fromhex(answer.echo_key)) == 32
    again = probing.news(body.model_copy(update={"peer_plan": answer.peer_plan}), [], NOW)
    assert (again.peers, again.peer_plan) == (None, answer.peer_plan)
    gang = probing.news(body, [("n1", "n3")], NOW)
    assert gang.peers == {"n2": "10.0.0.2:9339", "n3": "10.0.0.3:9339"}
    assert probing.news(ReportBody(nodes=(NODE,)), [], NOW).peers is None, "it measures nothing"


def test_an_agent_whose_address_the_broker_would_refuse_measures_nothing_and_reports_its_devices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for address in ("0.0.0.0", "gpu-host"):
        neighbours = measured_on(9339, address=address, broker_url="http://127.0.0.1:8080")
        assert neighbours.added_to(NODE) == NODE
        assert "give --latency-address" in caplog.text
