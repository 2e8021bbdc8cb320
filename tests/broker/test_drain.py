"""What people drain is not offered, and says whose wish it was."""

from __future__ import annotations

from datetime import timedelta

from airflow_gpu_provider.broker.drain import Drain, DrainScope, with_drains
from airflow_gpu_provider.broker.model import Fleet

from .builders import NOW, fleet, fleet_of, node

HOUR = timedelta(hours=1)


def unavailable(some: Fleet) -> dict[str, str]:
    rows = [(each.name, each.unavailable) for each in some.nodes]
    rows += [(device.id, device.unavailable) for each in some.nodes for device in each.devices]
    return {str(name): why for name, why in rows if why is not None}


def test_a_drained_node_and_a_drained_device_are_unavailable_with_reason() -> None:
    drains = [
        Drain(DrainScope.NODE, "n0", "new switch", "ada", NOW - HOUR),
        Drain(DrainScope.DEVICE, "n1/2", "fan", "bob", NOW - HOUR, until=NOW + HOUR),
    ]
    assert unavailable(with_drains(fleet(2), drains, NOW)) == {
        "n0": "drained by ada: new switch",
        "n1/2": "drained by bob until 2026-03-01 13:00 UTC: fan",
    }


def test_a_drain_holds_from_its_start_until_its_end() -> None:
    drain = Drain(DrainScope.NODE, "n0", "move", "ada", NOW, until=NOW + HOUR)
    told = [bool(unavailable(with_drains(fleet(1), [drain], NOW + HOUR * k))) for k in (-1, 0, 0.9, 1)]
    assert told == [False, True, True, False]


def test_health_stays_visible_under_a_drain() -> None:
    some = fleet_of(node("n0", 2, bad={1: "XID 79"}, unavailable="no report"))
    drains = [
        Drain(scope, name, "check", "ada", NOW)
        for scope, name in ((DrainScope.NODE, "n0"), (DrainScope.DEVICE, "n0/1"))
    ]
    assert unavailable(with_drains(some, drains, NOW)) == {
        "n0": "drained by ada: check; no report",
        "n0/1": "drained by ada: check; XID 79",
    }


def test_the_newest_drain_of_a_target_is_told_and_others_touch_nothing() -> None:
    some = fleet(2)
    drains = [
        Drain(DrainScope.NODE, "n0", "second", "bob", NOW),
        Drain(DrainScope.NODE, "n0", "first", "ada", NOW - HOUR),
        Drain(DrainScope.DEVICE, "n0", "a node's name is no device", "eve", NOW),
    ]
    found = with_drains(some, drains, NOW)
    assert unavailable(found) == {"n0": "drained by bob: second"}
    assert found.nodes[1] is some.nodes[1]
