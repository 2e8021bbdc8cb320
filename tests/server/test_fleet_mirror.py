from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone

import pytest
from pydantic import ValidationError

from airflow_gpu_provider.reports import NodeReport
from airflow_gpu_provider.server import fleet as fleet_module
from airflow_gpu_provider.server.fleet import FleetMirror
from airflow_gpu_provider.server.reported import has_device
from airflow_gpu_provider.store.nodes import StoredNode

from .conftest import report

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def mirror() -> FleetMirror:
    return FleetMirror(stale_after_s=10, forget_after_s=3600, max_load=0.46)


def with_utilisation(node: NodeReport, value: float) -> NodeReport:
    devices = tuple(d.model_copy(update={"utilisation": value}) for d in node.devices)
    return node.model_copy(update={"devices": devices})


def test_a_node_that_stops_reporting_is_stale_and_comes_back() -> None:
    fleet = mirror()
    fleet.fold([report()], NOW)
    assert fleet.fleet(after(9)).nodes[0].unavailable is None
    stale = fleet.fleet(after(11)).nodes[0].unavailable
    assert stale == "no report for more than 10 s"
    assert fleet.fold([report()], after(12)), "its return may let claims start"
    assert fleet.fleet(after(13)).nodes[0].unavailable is None


def test_only_what_matters_for_a_placement_wakes_the_leader() -> None:
    fleet = mirror()
    assert fleet.fold([report()], NOW)
    assert not fleet.fold([with_utilisation(report(), 0.9)], after(1))
    assert fleet.fold([report(suspect="XID 79")], after(2))


def test_a_load_that_crosses_what_a_node_may_have_is_seen_however_little_it_moved() -> None:
    fleet = mirror()
    fleet.fold([report().model_copy(update={"load": 0.46})], NOW)
    for second, load in enumerate((0.458, 0.461), 1):
        assert fleet.fold([report().model_copy(update={"load": load})], after(second))
        assert fleet.fleet(after(second)).nodes[0].load == load
        fleet.mark_saved(*fleet.unsaved())
        assert not fleet.fold([report().model_copy(update={"load": load + 0.001})], after(second))
        assert fleet.unsaved() == ([], [])


def test_the_database_hears_of_changes_at_once_and_of_the_rest_seldom() -> None:
    fleet = mirror()
    fleet.fold([report()], NOW)
    changed, alive = fleet.unsaved()
    assert ([stored.report.name for stored in changed], alive) == (["n1"], [])
    fleet.mark_saved(changed, alive)
    fleet.fold([with_utilisation(report(), 0.5)], after(1))
    assert fleet.unsaved() == ([], [])
    fleet.fold([with_utilisation(report(), 0.5)], after(4))
    assert fleet.unsaved() == ([], ["n1"]), "other replicas must see that the node is alive"
    fleet.mark_saved([], ["n1"])
    fleet.fold([report(suspect="XID 79")], after(5))
    assert [stored.report.name for stored in fleet.unsaved()[0]] == ["n1"]


def test_a_node_that_left_for_good_is_no_longer_part_of_the_fleet() -> None:
    fleet = mirror()
    fleet.fold([report("old")], NOW)
    fleet.fold([report("new")], after(3700))
    assert [node.name for node in fleet.fleet(after(3700)).nodes] == ["new"]


def test_what_another_replica_stored_counts_where_it_is_newer() -> None:
    fleet = mirror()
    fleet.fold([report(gpus=2)], after(5))
    fleet.merge([StoredNode(report(gpus=1), NOW), StoredNode(report("n2", gpus=3), NOW)])
    assert {n.name: len(n.devices) for n in fleet.fleet(after(6)).nodes} == {"n1": 2, "n2": 3}


def test_artifacts_stay_known_until_the_agent_names_others() -> None:
    fleet, bare = mirror(), report()
    fleet.fold([bare.model_copy(update={"artifacts": ("/data//gpt2/", "sha256:ab")})], NOW)
    known = frozenset({"/data/gpt2", "sha256:ab"})
    assert fleet.fleet(NOW).nodes[0].artifacts == known, "a path is written in one way"
    assert not fleet.fold([bare], after(1)), "they are told once a minute only"
    assert not fleet.fold([with_utilisation(bare, 0.9)], after(2))
    assert fleet.fleet(after(2)).nodes[0].artifacts == known
    (stored,) = fleet.stored()
    assert stored.report.artifacts == ("/data//gpt2/", "sha256:ab"), "other replicas must hear of them"
    other = mirror()
    other.merge([stored])
    assert not other.fold([bare], after(3)) and other.fleet(after(3)).nodes[0].artifacts == known
    assert fleet.fold([bare.model_copy(update={"artifacts": ()})], after(4))
    assert fleet.fleet(after(4)).nodes[0].artifacts == frozenset()


def test_a_device_used_by_outsiders_is_not_offered_and_names_them() -> None:
    node = report()
    taken = node.devices[0].model_copy(update={"foreign_pids": (4242,)})
    fleet = mirror()
    fleet.fold([node.model_copy(update={"devices": (taken, node.devices[1])})], NOW)
    first, second = fleet.fleet(NOW).nodes[0].devices
    assert first.unavailable == "used by processes outside the broker (pid 4242)"
    assert second.unavailable is None


def test_where_devices_and_nodes_lie_reaches_the_core() -> None:
    fleet, told = mirror(), report()
    devices = tuple(each.model_copy(update={"nvlink": "0000:07:00", "numa": 1}) for each in told.devices)
    place = {"labels": {"rack": "r1"}, "latency_ms": {"n2": 0.21}, "devices": devices}
    assert fleet.fold([told], NOW) and fleet.fold([told.model_copy(update=place)], after(1))
    (node,) = fleet.fleet(after(6)).nodes
    assert (node.labels, node.latency_ms) == ({"rack": "r1"}, {"n2": 0.21})
    assert {(each.nvlink, each.numa) for each in node.devices} == {("0000:07:00", 1)}


def test_latencies_reach_placements_all_at_once_and_the_database_later() -> None:
    def told(node: str, **latency_ms: float | None) -> NodeReport:
        return report(node).model_copy(update={"latency_ms": latency_ms, "loss": {"n3": 0.25}})

    fleet = mirror()
    fleet.fold([report("n1"), report("n2")], NOW)
    fleet.mark_saved(*fleet.unsaved())
    version = fleet.version
    assert not fleet.fold([told("n1", n2=0.211, n3=4.0), told("n2", n1=0.3)], after(1)), (
        "no claim waits for it"
    )
    assert [node.latency_ms for node in fleet.fleet(after(3)).nodes] == [{}, {}] and fleet.version == version
    fleet.fold([report("n1"), told("n1", n2=0.208)], after(4))
    known = [{"n2": 0.21, "n3": 4.0}, {"n1": 0.3}]
    assert [node.latency_ms for node in fleet.fleet(after(6)).nodes] == known, (
        "reports bring only what is new"
    )
    assert fleet.unsaved()[0] == []
    fleet.age(after(31))
    changed, _ = fleet.unsaved()
    other = mirror()
    other.merge(changed)
    fresh = [report("n1"), report("n2")]
    other.fold(fresh, after(60))
    assert [node.latency_ms for node in other.fleet(after(60)).nodes] == known, "the next leader knows them"
    assert other.stored()[0].report.loss == {"n3": 0.25}
    fleet.mark_saved(changed, [])
    assert fleet.unsaved()[0] == []
    fleet.fold([told("n1", n3=None)], after(32))
    assert fleet.fleet(after(38)).nodes[0].latency_ms == {"n2": 0.21}, "it does not answer any more"


def test_however_many_peers_were_silent_what_is_stored_can_be_read_again() -> None:
    fleet = mirror()
    for part in range(3):
        silent = [f"n{part}-{number}" for number in range(400)]
        news = {"latency_ms": dict.fromkeys(silent), "loss": dict.fromkeys(silent, 1.0)}
        fleet.fold([report("n1").model_copy(update=news)], after(part))
    (stored,) = fleet.stored()
    assert len(NodeReport.model_validate(stored.report.model_dump()).loss) == 1000
    assert "n0-0" not in stored.report.loss, "the oldest made room"


def test_what_was_measured_to_a_node_that_left_is_forgotten() -> None:
    fleet = mirror()
    told = {"latency_ms": {"n2": 0.2, "n3": None}, "loss": {"n3": 1.0}}
    fleet.fold([report("n2"), report("n3")], NOW)
    fleet.fold([report("n1").model_copy(update=told)], after(3500))
    fleet.age(after(3700))
    (left,) = fleet.stored()
    assert (left.report.name, left.report.latency_ms, left.report.loss) == ("n1", {}, {})


def test_a_report_with_too_many_labels_or_a_negative_latency_is_refused() -> None:
    for wrong in ({"labels": {str(n): "x" for n in range(101)}}, {"latency_ms": {"n2": -1.0}}):
        with pytest.raises(ValidationError):
            NodeReport.model_validate({**report().model_dump(), **wrong})


def test_a_device_is_found_by_who_looks_while_it_is_noted() -> None:
    fleet, found, readers = mirror(), [], []
    fleet.fold([report()], NOW)
    is_owned = fleet._is_owned

    def slowly(device: str, node: str) -> bool:
        if not readers:
            readers.append(threading.Thread(target=lambda: found.append(fleet.device("GPU-n1-0"))))
            readers[0].start()
            readers[0].join(0.3)
        return is_owned(device, node)

    fleet._is_owned = slowly  # type: ignore[method-assign]
    assert fleet.device("GPU-n1-1") is not None
    readers[0].join(20)
    assert found[0] is not None


def test_a_report_that_tells_nothing_new_costs_no_look_at_who_else_has_its_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = mirror()
    looks: list[str] = []

    def counted(told: NodeReport, device_id: str) -> bool:
        looks.append(device_id)
        return has_device(told, device_id)

    monkeypatch.setattr(fleet_module, "has_device", counted)
    fleet.fold([report("a"), report("b")], NOW)
    looks.clear()
    for second in range(1, 4):
        assert not fleet.fold(
            [with_utilisation(report(name), second / 10) for name in ("a", "b")], after(second)
        )
    assert looks == []
    assert fleet.fold([report("a", gpus=3)], after(4)) and looks, "other devices: whose are they?"


def test_a_device_of_two_nodes_passes_to_the_other_when_the_first_falls_silent_and_stays_there() -> None:
    fleet, twin = mirror(), report("b").model_copy(update={"devices": report("a").devices})
    devices = [device.id for device in twin.devices]

    def owners(second: float) -> dict[str, int]:
        return {node.name: len(node.devices) for node in fleet.fleet(after(second)).nodes}

    fleet.fold([report("a"), twin], NOW)
    fleet.fold([report("a"), twin], after(1))
    assert owners(2) == {"a": 2, "b": 0}
    fleet.age(after(12))  # a has been silent since
    fleet.fold([twin], after(12))
    assert owners(12) == {"a": 0, "b": 2}
    for second in (13, 14):
        fleet.fold([report("a"), twin], after(second))
        assert owners(second) == {"a": 0, "b": 2}
        assert fleet.also_reported_by(devices[0], "a") == "b"
    fleet.fold([report("b")], after(15))
    fleet.fold([report("a")], after(16))
    assert owners(16) == {"a": 2, "b": 2}, "b no longer has them"
