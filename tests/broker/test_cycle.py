from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from airflow_gpu_provider.broker.model import Snapshot

from .builders import NOW, claim, fleet, fleet_of, lease, node, placed, rejected, singles, snapshot, waiting
from .conftest import Cycle


def test_a_lease_past_its_time_ends_and_its_devices_go_on_in_the_same_cycle(cycle: Cycle) -> None:
    over = [lease("gone", "n0/0", expires_in_s=0), lease("dead", "n0/1", expires_in_s=-5)]
    live = [lease("alive", "n0/2", expires_in_s=0.001)]
    decisions = cycle(fleet(1, 3), [claim("next", 2)], over + live)
    assert decisions.expired == ("lease-gone", "lease-dead")
    assert placed(decisions) == {"next": ["n0/0", "n0/1"]}


def test_leases_expire_even_when_nobody_waits_and_no_node_reports(cycle: Cycle) -> None:
    assert cycle(fleet(0), [], [lease("gone", "n0/0", expires_in_s=0)]).expired == ("lease-gone",)


def test_a_claim_that_holds_a_live_lease_already_is_not_served_twice(cycle: Cycle) -> None:
    decisions = cycle(fleet(1, 2), [claim("same"), claim("other")], [lease("same", "n0/0")])
    assert placed(decisions) == {"other": ["n0/1"]}
    assert waiting(decisions) == {}


def test_a_claim_whose_lease_expired_is_served_again(cycle: Cycle) -> None:
    decisions = cycle(fleet(1, 1), [claim("same")], [lease("same", "n0/0", expires_in_s=0)])
    assert placed(decisions) == {"same": ["n0/0"]}


def test_a_lease_on_a_node_that_left_takes_nothing_of_the_rest(cycle: Cycle) -> None:
    gone = [lease("x", "left/0 n0/0", cpu_cores=64)]
    assert placed(cycle(fleet(1, 2), [claim("next", cpu_cores=32)], gone)) == {"next": ["n0/1"]}


def test_a_drained_device_under_a_lease_is_not_offered_when_the_lease_ends(cycle: Cycle) -> None:
    some = fleet_of(node("a", 2, bad={0: "drained"}))
    decisions = cycle(some, [claim("one"), claim("two")], [lease("x", "a/0", expires_in_s=0)])
    assert placed(decisions) == {"one": ["a/1"]}


def test_an_idle_broker_decides_nothing(cycle: Cycle) -> None:
    decisions = cycle(Snapshot(fleet(), (), ()))
    assert (decisions.placements, decisions.rejections, decisions.waiting, decisions.expired) == (
        (),
        (),
        (),
        (),
    )


def test_without_any_device_claims_wait_for_an_agent_but_are_not_left_to_hang(cycle: Cycle) -> None:
    assert waiting(cycle(fleet(0), [claim("one")]))["one"].reason.code.value == "impossible"
    for_an_hour = replace(claim("one"), impossible_since=NOW - timedelta(hours=1))
    assert rejected(cycle(fleet(0), [for_an_hour])) == {"one": "no_devices"}


def test_an_impossible_claim_at_the_head_holds_nothing(cycle: Cycle) -> None:
    decisions = cycle(fleet(1, 4), [claim("never", 5, value=99), claim("one")])
    assert rejected(decisions) == {"never": "exceeds_fleet"}
    assert list(placed(decisions)) == ["one"]


def test_all_claims_are_served_in_one_cycle_while_there_is_room(cycle: Cycle) -> None:
    queue = [claim(f"c{number:02}", 1 + number % 3) for number in range(10)]
    decisions = cycle(fleet(5, 4), queue)
    assert len(decisions.placements) == 10
    given = [device for devices in placed(decisions).values() for device in devices]
    assert len(given) == len(set(given)) == 19


def test_a_waiting_claim_starts_when_what_it_waited_for_comes_back(cycle: Cycle) -> None:
    drained = fleet_of(node("a", 1, unavailable="drained"))
    before = snapshot(drained, [claim("one")])
    assert waiting(cycle(before))["one"].reason.code.value == "devices_unavailable"
    assert placed(cycle(replace(before, fleet=fleet_of(node("a", 1))))) == {"one": ["a/0"]}


def test_five_hundred_waiting_claims_all_have_a_position_and_a_reason(cycle: Cycle) -> None:
    queue = [claim(f"c{number:03}", 1 + number % 4, cpu_cores=number % 7) for number in range(500)]
    decisions = cycle(fleet(2, 4), queue, singles(4, on="n0", max_runtime_s=60) + singles(4, on="n1"), NOW)
    assert [each.position for each in decisions.waiting] == list(range(1, 501))
    assert all(each.reason.text for each in decisions.waiting)
