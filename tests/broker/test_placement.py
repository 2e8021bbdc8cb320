from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_gpu_provider.broker.cycle import decide
from airflow_gpu_provider.broker.model import CyclePolicy, Snapshot

from .builders import (
    NOW,
    claim,
    device,
    fleet,
    fleet_of,
    lease,
    node,
    nodes_of,
    placed,
    request,
    singles,
    snapshot,
    waiting,
)
from .conftest import Cycle


def test_a_gang_stays_on_one_node_when_one_has_room(cycle: Cycle) -> None:
    busy = singles(1, on="n0") + singles(2, on="n1")
    decisions = cycle(fleet(3, 4), [claim("gang", 4)], busy)
    assert nodes_of(placed(decisions)["gang"]) == {"n2"}


def test_a_gang_that_fits_no_node_stays_on_one_host_when_one_has_room(cycle: Cycle) -> None:
    some = fleet_of(
        node("a", 3, host="h1"), node("b", 3, host="h2"), node("c", 3, host="h2"), node("d", 3, host="h1")
    )
    busy = singles(1, on="a")
    decisions = cycle(some, [claim("gang", 6)], busy)
    assert nodes_of(placed(decisions)["gang"]) == {"b", "c"}


def test_a_gang_spans_hosts_when_it_must_over_as_few_nodes_as_can_be(cycle: Cycle) -> None:
    some = fleet_of(node("a", 2), node("b", 4), node("c", 4), node("d", 2))
    assert nodes_of(placed(cycle(some, [claim("gang", 8)]))["gang"]) == {"b", "c"}
    assert nodes_of(placed(cycle(some, [claim("gang", 6)]))["gang"]) in ({"b", "a"}, {"b", "d"}, {"c", "a"})


def test_a_gang_prefers_alike_devices_and_mixes_only_when_it_must(cycle: Cycle) -> None:
    some = fleet_of(node("m", models=["A100", "V100", "A100", "V100"]), node("v", 1, "V100"))
    devices = placed(cycle(some, [claim("three", 3)]))["three"]
    assert sorted(devices) == ["m/1", "m/3", "v/0"]
    assert len(placed(cycle(some, [claim("five", 5)]))["five"]) == 5


def test_a_gang_waits_for_devices_of_one_speed_where_the_fleet_has_enough_of_them(cycle: Cycle) -> None:
    """It works at the pace of its slowest member: on mixed models the fast ones would idle."""
    some = fleet_of(node("a", 4, "A100"), node("v", 4, "V100"))
    busy = singles(2, on="a") + singles(3, on="v")
    decisions = cycle(some, [claim("gang", 3, value=9), claim("single")], busy)
    assert list(placed(decisions)) == ["single"], "what the gang does not wait for is not kept for it"
    assert waiting(decisions)["gang"].reason.text == (
        "asked 3 GPUs; of 8 suitable devices 2 free, 6 leased; starts when 1 more of one speed can be had"
    )
    assert len(placed(cycle(some, [claim("gang", 3)], busy[1:]))["gang"]) == 3


def test_a_gang_may_mix_models_of_one_speed(cycle: Cycle) -> None:
    large = node("large", 0)
    devices = tuple(device("large", index, memory_mib=40_960) for index in range(2))
    some = fleet_of(node("a", 2), replace(large, devices=devices))
    assert len(placed(cycle(some, [claim("gang", 4)]))["gang"]) == 4


def test_a_claim_bound_to_a_host_uses_only_its_nodes(cycle: Cycle) -> None:
    some = fleet_of(node("a", 2, host="h1"), node("b", 2, host="h1"), node("c", 8, host="h2"))
    assert nodes_of(placed(cycle(some, [claim("gang", 4, host="h1")]))["gang"]) == {"a", "b"}
    blocked = cycle(some, [claim("gang", 4, host="h1")], singles(1, on="a"))
    assert waiting(blocked)["gang"].reason.text.startswith(
        "asked 4 GPUs on host h1; of 4 suitable devices 3 free"
    )


def test_the_least_loaded_node_is_taken_among_those_that_cost_the_same(cycle: Cycle) -> None:
    some = fleet_of(node("a", 4, load=0.4), node("b", 4, load=0.1), node("c", 4, load=0.3))
    assert placed(cycle(some, [claim("one")])) == {"one": ["b/0"]}


def test_load_does_not_scatter_small_claims_over_whole_nodes(cycle: Cycle) -> None:
    """A node that can still serve a gang of 4 is kept whole, though it is the less loaded one."""
    some = fleet_of(node("a", 4, load=0.4), node("b", 4, load=0.1))
    recent = (request(4), request(1)) * 50
    before = Snapshot(some, tuple(singles(1, on="a")), (claim("one"),), recent)
    assert placed(cycle(before)) == {"one": ["a/1"]}
    by_load_alone = decide(before, NOW, CyclePolicy(cost_band=100_000))
    assert placed(by_load_alone) == {"one": ["b/0"]}


def test_nodes_at_the_limit_of_load_are_left_out_where_load_is_known(cycle: Cycle) -> None:
    some = fleet_of(node("busy", 1, load=0.5), node("unknown", 1, load=None))
    assert placed(cycle(some, [claim("one"), claim("two")])) == {"one": ["unknown/0"]}
    reason = waiting(cycle(some, [claim("gang", 2)]))["gang"].reason
    assert reason.code.value == "nodes_busy"
    assert "1 free, 1 on busy nodes; starts when the load of nodes falls below 50%" in reason.text
    assert len(placed(cycle(some, [claim("one"), claim("two")], policy=CyclePolicy(max_load=0.6)))) == 2


def test_cpu_and_memory_that_leases_use_are_respected(cycle: Cycle) -> None:
    some = fleet_of(node("a", 4, cpu_cores=16, memory_mib=1000), node("b", 4, cpu_cores=10, memory_mib=1000))
    busy = [lease("x", "a/0 a/1", cpu_cores=12, host_memory_mib=100)]
    assert placed(cycle(some, [claim("cores", cpu_cores=8)], busy)) == {"cores": ["b/0"]}
    full = [*busy, lease("y", "b/0", host_memory_mib=950)]
    assert placed(cycle(some, [claim("memory", host_memory_mib=100)], full)) == {"memory": ["a/2"]}
    blocked = cycle(some, [claim("both", cpu_cores=8, host_memory_mib=100)], full)
    assert waiting(blocked)["both"].reason.code.value == "host_full"


def test_a_gang_over_two_nodes_takes_of_each_by_the_members_there(cycle: Cycle) -> None:
    some = fleet_of(node("a", 4, cpu_cores=8), node("b", 4, cpu_cores=4))
    gang = lease("x", "a/0 a/1 a/2 b/0", cpu_cores=8)  # 6 cores of a, 2 of b
    assert placed(cycle(some, [claim("two", cpu_cores=2)], [gang])).keys() == {"two"}
    decisions = cycle(some, [claim("more", cpu_cores=2.5)], [gang])
    assert waiting(decisions)["more"].reason.code.value == "host_full"


def test_two_flavors_of_one_node_share_its_cores(cycle: Cycle) -> None:
    some = fleet_of(node("m", models=["A100", "V100"], cpu_cores=8))
    decisions = cycle(some, [claim("a", 1, "A100", cpu_cores=5), claim("v", 1, "V100", cpu_cores=5)])
    assert list(placed(decisions)) == ["a"]
    assert waiting(decisions)["v"].reason.code.value == "host_full"


def test_scarce_models_are_left_to_those_who_accept_no_other(cycle: Cycle) -> None:
    some = fleet_of(node("a", 2, "A100"), node("v", 2, "V100"))
    flexible = claim("flexible", value=1)
    choosy = [claim("choosy-1", 1, "A100"), claim("choosy-2", 1, "A100")]
    assert placed(cycle(some, [flexible, *choosy]))["flexible"] == ["v/0"]


# -- shares of a device
def test_a_device_with_600_milli_free_takes_a_share_of_500(cycle: Cycle) -> None:
    shared = [lease("x", "n0/0", milli=400)]
    assert placed(cycle(fleet(1, 1), [claim("half", milli=500)], shared)) == {"half": ["n0/0"]}
    tight = cycle(fleet(1, 1), [claim("more", milli=700)], shared)
    assert waiting(tight)["more"].reason.code.value == "devices_leased"
    assert "asked 1 shared GPU (0.7 of it)" in waiting(tight)["more"].reason.text


def test_a_whole_device_is_not_a_shared_one(cycle: Cycle) -> None:
    shared = [lease("x", "n0/0", milli=100)]
    assert placed(cycle(fleet(1, 2), [claim("whole")], shared)) == {"whole": ["n0/1"]}
    assert placed(cycle(fleet(1, 1), [claim("whole")], shared)) == {}


def test_shares_fill_devices_in_use_before_they_open_idle_ones(cycle: Cycle) -> None:
    shared = [lease("x", "n0/1", milli=500), lease("y", "n0/2", milli=300)]
    recent = (request(1, milli=500), request(1)) * 10
    before = Snapshot(fleet(1, 4), tuple(shared), (claim("half", milli=500),), recent)
    assert placed(cycle(before)) == {"half": ["n0/1"]}


def test_members_of_a_gang_of_shares_sit_on_distinct_devices(cycle: Cycle) -> None:
    devices = placed(cycle(fleet(1, 2), [claim("gang", 2, milli=300)]))["gang"]
    assert sorted(devices) == ["n0/0", "n0/1"]


# -- spares
def test_spares_come_from_idle_devices_of_the_same_kind(cycle: Cycle) -> None:
    some = fleet_of(node("a", 4, "A100"), node("v", 4, "V100"))
    (placement,) = cycle(some, [claim("gang", 2, "A100|V100", min_tflops=35, spares=4)]).placements
    assert {name.split("/")[0] for name in placement.spares} == {"a"}
    assert len(placement.spares) == 2, "as many as are idle; never a reason to wait"


def test_spares_never_take_what_another_claim_of_the_cycle_could_use(cycle: Cycle) -> None:
    claims = [claim("gang", 2, spares=4, value=9), claim("later", 1), claim("last", 1)]
    decisions = cycle(fleet(1, 5), claims)
    assert set(placed(decisions)) == {"gang", "later", "last"}
    assert len(decisions.placements[0].spares) == 1
    waits = cycle(fleet(1, 5), [*claims, claim("big", 5)])
    assert "big" in waiting(waits)
    assert waits.placements[0].spares == (), "the fifth device is kept for the gang that waits"


def test_spares_are_fed_with_cpu_like_members_and_sit_on_the_gangs_host_first(cycle: Cycle) -> None:
    some = fleet_of(node("a", 4, cpu_cores=9), node("b", 4, cpu_cores=9))
    (placement,) = cycle(some, [claim("gang", 2, cpu_cores=6, spares=3)]).placements
    home = placement.devices[0].split("/")[0]
    assert [name.split("/")[0] for name in placement.spares].count(home) == 1
    assert len(placement.spares) == 3


def test_spares_are_not_the_shared_device_of_a_member(cycle: Cycle) -> None:
    (placement,) = cycle(fleet(1, 2), [claim("gang", 1, milli=300, spares=3)]).placements
    assert len(set(placement.devices + placement.spares)) == 2


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_more_devices_than_a_bank_is_wide_do_not_upset_the_cost_of_others(cycle: Cycle, gpus: int) -> None:
    before = replace(snapshot(fleet(4, 2), [claim("one", gpus)]), recent=(request(64), request(gpus)))
    assert len(placed(cycle(before))["one"]) == gpus
