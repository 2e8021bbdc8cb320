"""Gangs get what lies near together, and nobody waits for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_provider.broker.capacity import Capacity, part_of_lease
from airflow_gpu_provider.broker.cycle import decide
from airflow_gpu_provider.broker.domains import Domains
from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.model import CyclePolicy, Fleet, Snapshot

from .builders import NOW, after, claim, device, fleet_of, lease, node, nodes_of, placed, singles, snapshot
from .conftest import Cycle
from .test_cycle_properties import POLICY, claims, nodes, quick, snapshots

PAIRS = {"nvlink": "aabbccdd", "numa": (0, 0, 0, 0, 1, 1, 1, 1)}


def slots_of(devices: list[str]) -> list[int]:
    return sorted(int(name.split("/")[1]) for name in devices)


def without_topology(before: Snapshot) -> Snapshot:
    bare = (
        replace(
            each,
            labels={},
            latency_ms={},
            devices=tuple(replace(device, nvlink=None, numa=None) for device in each.devices),
        )
        for each in before.fleet.nodes
    )
    return replace(before, fleet=Fleet(tuple(bare)))


# -- within a node
def test_a_gang_gets_the_devices_of_one_nvlink_domain(cycle: Cycle) -> None:
    some = fleet_of(node("n0", 8, nvlink="abababab"))
    assert slots_of(placed(cycle(some, [claim("gang", 4)], singles(1)))["gang"]) == [1, 3, 5, 7]


def test_a_gang_fills_the_smallest_domain_with_room_and_leaves_the_large_one_whole(cycle: Cycle) -> None:
    some = fleet_of(node("n0", 8, nvlink="aaaaaabb"))
    assert slots_of(placed(cycle(some, [claim("gang", 2)]))["gang"]) == [6, 7]


def test_a_single_device_comes_from_the_most_broken_domain(cycle: Cycle) -> None:
    some = fleet_of(node("n0", 8, **PAIRS))
    assert slots_of(placed(cycle(some, [claim("one")], singles(1, first=4)))["one"]) == [5]
    assert slots_of(placed(cycle(some, [claim("share", milli=500)], singles(1, first=4)))["share"]) == [5]
    both = singles(1, first=0) + singles(1, first=1)
    assert slots_of(placed(cycle(some, [claim("one")], both))["one"])[0] in (2, 3), "NUMA node 1 stays whole"


def test_a_gang_larger_than_a_domain_gets_domains_of_one_numa_node(cycle: Cycle) -> None:
    some = fleet_of(node("n0", 8, **PAIRS))
    assert slots_of(placed(cycle(some, [claim("gang", 4)], singles(2)))["gang"]) == [4, 5, 6, 7]


def test_within_one_large_domain_a_gang_gets_one_numa_node(cycle: Cycle) -> None:
    some = fleet_of(node("n0", 8, nvlink="aaaaaaaa", numa=(0, 1) * 4))
    assert slots_of(placed(cycle(some, [claim("gang", 4)], singles(1)))["gang"]) == [1, 3, 5, 7]


def test_numa_nodes_alone_count_where_there_is_no_nvlink(cycle: Cycle) -> None:
    some = fleet_of(node("n0", 4, numa=(0, 1, 0, 1)))
    assert slots_of(placed(cycle(some, [claim("gang", 2)], singles(1)))["gang"]) == [1, 3]


def test_a_device_without_links_is_near_to_no_other(cycle: Cycle) -> None:
    some = fleet_of(node("n0", 6, nvlink="--aaaa"))
    assert slots_of(placed(cycle(some, [claim("gang", 2)]))["gang"]) in ([2, 3], [4, 5])
    assert slots_of(placed(cycle(some, [claim("one")]))["one"]) in ([0], [1])


def test_a_gang_that_fits_no_domain_is_placed_across_them(cycle: Cycle) -> None:
    some = fleet_of(node("n0", 4, nvlink="abcd", numa=(0, 1, 2, 3)))
    assert len(placed(cycle(some, [claim("gang", 4)]))["gang"]) == 4


def test_a_gang_of_shares_fills_devices_in_use_first_and_stays_near_them(cycle: Cycle) -> None:
    some = fleet_of(node("n0", 4, nvlink="abba"))
    used = [lease("used", "n0/1", milli=300)]
    assert slots_of(placed(cycle(some, [claim("gang", 2, milli=400)], used))["gang"]) == [1, 2]


# -- which node takes a gang that fits on one
def node_of(taken: list[str]) -> str:
    return taken[0].split("/")[0]


def test_a_node_whose_domain_takes_the_whole_gang_comes_before_one_where_it_is_torn(cycle: Cycle) -> None:
    torn = node("n0", 4, nvlink="aabb", load=0.1)
    whole = node("n1", 4, nvlink="aabb", load=0.3)
    held = [lease(f"l{at}", device) for at, device in enumerate(("n0/0", "n0/2", "n1/0", "n1/1"))]
    assert placed(cycle(fleet_of(torn, whole), [claim("gang", 2)], held))["gang"] == ["n1/2", "n1/3"]
    assert node_of(placed(cycle(fleet_of(torn, whole), [claim("one")], held))["one"]) == "n0", "by load alone"
    bare = replace(torn, devices=tuple(replace(each, nvlink=None) for each in torn.devices))
    assert node_of(placed(cycle(fleet_of(bare, whole), [claim("gang", 2)], held))["gang"]) == "n1"


def test_a_small_gang_breaks_no_large_domain_where_a_small_one_has_room(cycle: Cycle) -> None:
    large, small = node("n0", 4, nvlink="aaaa", load=0.1), node("n1", 4, nvlink="aabb", load=0.3)
    assert node_of(placed(cycle(fleet_of(large, small), [claim("gang", 2)]))["gang"]) == "n1"
    assert node_of(placed(cycle(fleet_of(large, small), [claim("gang", 3)]))["gang"]) == "n0"
    full = [lease("l0", "n1/0"), lease("l1", "n1/2")]
    found = placed(cycle(fleet_of(large, small), [claim("gang", 2)], full))["gang"]
    assert node_of(found) == "n0", "rather broken than torn"


def test_among_nodes_that_suit_a_gang_alike_the_load_decides(cycle: Cycle) -> None:
    some = [node(f"n{at}", 4, nvlink="aabb", load=load) for at, load in enumerate((0.3, 0.1, 0.2))]
    assert node_of(placed(cycle(fleet_of(*some), [claim("gang", 2)]))["gang"]) == "n1"


slots = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None]), st.sampled_from([0, 1, None])), min_size=1, max_size=8
)


@given(where=slots, data=st.data())
@quick
def test_no_other_choice_has_fewer_domains(
    where: list[tuple[str | None, int | None]], data: st.DataObject
) -> None:
    devices = [device("n0", at, nvlink=nvlink, numa=numa) for at, (nvlink, numa) in enumerate(where)]
    domains = Domains.of(devices)
    free = sorted(data.draw(st.sets(st.sampled_from(range(len(where))), min_size=1)))
    number = data.draw(st.integers(1, len(free)))
    if domains is None:
        assert len(set(where)) == 1
        return
    chosen = domains.nearest(free, number)
    assert len(set(chosen)) == number and set(chosen) <= set(free)

    def spans(some: tuple[int, ...]) -> tuple[int, bool]:
        return len({domains.nvlink[slot] for slot in some}), len({domains.numa[slot] for slot in some}) > 1

    assert spans(tuple(chosen)) == min(map(spans, combinations(free, number)))


# -- over nodes
def test_a_gang_over_nodes_stays_in_one_rack_when_as_few_of_its_nodes_do(cycle: Cycle) -> None:
    racks = ["r1", "r2", "r1", "r3", "r2"]
    some = fleet_of(*(node(f"n{at}", 4, labels={"rack": rack}) for at, rack in enumerate(racks)))
    assert nodes_of(placed(cycle(some, [claim("gang", 8)], singles(1, on="n0")))["gang"]) == {"n1", "n4"}


def test_the_tightest_rack_is_taken_so_that_large_ones_stay_whole(cycle: Cycle) -> None:
    some = fleet_of(*(node(f"n{at}", 4, labels={"rack": "small" if at > 3 else "large"}) for at in range(6)))
    assert nodes_of(placed(cycle(some, [claim("gang", 8)]))["gang"]) == {"n4", "n5"}


def test_few_nodes_come_before_one_rack(cycle: Cycle) -> None:
    one_rack = [node(f"n{at}", 2, labels={"rack": "r1"}) for at in range(4)]
    some = fleet_of(*one_rack, node("x", 4, labels={"rack": "r2"}), node("y", 4, labels={"rack": "r3"}))
    assert nodes_of(placed(cycle(some, [claim("gang", 8)]))["gang"]) == {"x", "y"}


def test_a_gang_that_fits_no_rack_stays_in_one_zone_in_as_few_racks_as_can_be(cycle: Cycle) -> None:
    where = ["p/1", "q/1", "q/1", "q/2", "q/3", "p/1", "q/4"]
    some = fleet_of(
        *(
            node(f"n{at}", 2, labels=dict(zip(("zone", "rack"), each.split("/"), strict=True)))
            for at, each in enumerate(where)
        )
    )
    found = nodes_of(placed(cycle(some, [claim("gang", 6)]))["gang"])
    assert found >= {"n1", "n2"} and not found & {"n0", "n5"}


def test_racks_of_one_name_in_two_zones_are_two(cycle: Cycle) -> None:
    some = fleet_of(
        node("a", 2, labels={"zone": "p", "rack": "r1"}),
        node("b", 2, labels={"zone": "q", "rack": "r1"}),
        node("c", 2, labels={"zone": "q", "rack": "r1"}),
    )
    assert nodes_of(placed(cycle(some, [claim("gang", 4)]))["gang"]) == {"b", "c"}


def test_the_nodes_with_the_lowest_latency_to_one_another_are_taken(cycle: Cycle) -> None:
    far = {"n0": {"n1": 9.0, "n2": 9.0, "n3": 9.0}, "n1": {"n2": 5.0, "n3": 0.2}, "n2": {"n3": 5.0}}
    some = fleet_of(*(node(f"n{at}", 2, latency_ms=far.get(f"n{at}", {})) for at in range(4)))
    assert nodes_of(placed(cycle(some, [claim("gang", 4)]))["gang"]) == {"n1", "n3"}
    one_way = fleet_of(*(node(f"n{at}", 2, latency_ms={"n2": 1.0} if at == 3 else {}) for at in range(4)))
    assert nodes_of(placed(cycle(one_way, [claim("gang", 4)]))["gang"]) == {"n2", "n3"}, (
        "known before unknown"
    )


def test_the_rack_comes_before_the_latency(cycle: Cycle) -> None:
    some = fleet_of(
        node("a", 2, labels={"rack": "r1"}, latency_ms={"b": 0.1, "c": 3.0}),
        node("b", 2, labels={"rack": "r2"}),
        node("c", 2, labels={"rack": "r1"}),
    )
    assert nodes_of(placed(cycle(some, [claim("gang", 4)]))["gang"]) == {"a", "c"}


racked = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from(["r1", "r2", "r3", None])), min_size=2, max_size=6
)


@given(rows=racked, gpus=st.integers(2, 12))
@quick
def test_no_gang_is_split_over_racks_that_one_rack_could_take_with_as_few_nodes(
    rows: list[tuple[int, str | None]], gpus: int
) -> None:
    some = [
        node(f"n{at}", size, labels={} if rack is None else {"rack": rack})
        for at, (size, rack) in enumerate(rows)
    ]
    found = placed(decide(snapshot(fleet_of(*some), [claim("gang", gpus)]), NOW, POLICY)).get("gang")
    sizes = sorted((size for size, _ in rows), reverse=True)
    assert (found is None) == (sum(sizes) < gpus)
    if found is None:
        return
    on = Counter(name.split("/")[0] for name in found)
    least = next(count for count in range(1, len(sizes) + 1) if sum(sizes[:count]) >= gpus)
    assert len(on) == least
    used = {each.labels.get("rack", each.name) for each in some if each.name in on}
    for rack in ("r1", "r2", "r3"):
        best = sorted((size for size, of in rows if of == rack), reverse=True)[:least]
        assert len(used) == 1 or sum(best) < gpus


# -- both
@given(before=snapshots(), new=claims("gang", most=1))
@quick
def test_a_gang_is_placed_exactly_when_it_is_without_topology(before: Snapshot, new: list) -> None:
    before = replace(before, claims=tuple(new))
    with_it, bare = decide(before, NOW, POLICY), decide(without_topology(before), NOW, POLICY)
    assert placed(with_it).keys() == placed(bare).keys()
    layout = Layout.of(before.fleet)
    leases = [each for each in after(before, with_it, NOW).leases if each.expires_at > NOW]
    capacity = Capacity.idle(layout, max_load=POLICY.max_load)
    capacity.take_all([part_of_lease(layout, each) for each in leases])
    capacity.validate([part_of_lease(layout, each) for each in leases], max_load=POLICY.max_load)
    offered = layout.offered & capacity.open
    new_places = [layout.place_of[name] for made in with_it.placements for name in made.devices + made.spares]
    assert all(offered[place] and capacity.milli[place] >= 0 for place in new_places)


@given(some=nodes(), asked=claims("c"))
@quick
def test_domains_change_which_devices_of_a_node_are_given_and_nothing_else(some: tuple, asked: list) -> None:
    """However many claims are placed one after the other: as much of each share is free as without them."""
    unlabelled = tuple(replace(each, labels={}, latency_ms={}) for each in some)
    free = [replace(each, excluded=frozenset()) for each in asked]
    before = snapshot(fleet_of(*unlabelled), free)
    with_it, bare = decide(before, NOW, POLICY), decide(without_topology(before), NOW, POLICY)

    def by_node(decided: object) -> dict[str, Counter[str]]:
        return {
            name: Counter(map(lambda each: each.split("/")[0], got)) for name, got in placed(decided).items()
        }

    assert by_node(with_it) == by_node(bare)


def test_the_engine_follows_new_latencies_without_starting_anew() -> None:
    some = [node(f"n{at}", 2, latency_ms={"n0": 5.0, "n1": 5.0, "n2": 5.0}) for at in range(3)]
    engine = Engine(CyclePolicy(), fleet_of(*some))
    placer = engine.floor.placer
    nearer = replace(some[2], latency_ms={"n1": 0.3})
    engine.set_fleet(fleet_of(some[0], replace(some[1], latency_ms={"n2": 0.3}), nearer), NOW)
    assert engine.floor.placer is placer
    engine.submit(claim("gang", 4))
    assert nodes_of(placed(engine.turn(NOW))["gang"]) == {"n1", "n2"}
