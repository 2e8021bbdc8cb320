"""A lease grows on the arrays of a turn as it was decided."""

from __future__ import annotations

import numpy as np

from airflow_gpu_provider.broker.capacity import Capacity, part_of_lease
from airflow_gpu_provider.broker.fragmentation import Mix
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.model import DeviceId, Fleet, Lease
from airflow_gpu_provider.broker.move import Offer, Resized, accept, commit
from airflow_gpu_provider.broker.placement import Placer
from airflow_gpu_provider.broker.resize import resize_members, resize_memory
from airflow_gpu_provider.broker.room import FreeRoom, part_of_offer

from .builders import NOW, fleet_of, lease, node


def arrays(some: Fleet, *leases: Lease) -> tuple[Layout, Capacity, FreeRoom]:
    layout = Layout.of(some)
    capacity = Capacity.idle(layout, max_load=0.5)
    capacity.take_all([part_of_lease(layout, each) for each in leases])
    mix = Mix.of(layout, [each.request for each in leases])
    return layout, capacity, FreeRoom(capacity, Placer(capacity, mix, cost_band=50.0))


def test_free_shares_are_those_beside_leases_and_of_what_is_offered() -> None:
    some = fleet_of(node("a", 3, bad={2: "XID 79"}))
    _, _, room = arrays(some, lease("x", "a/0", milli=300))
    free = {name: room.free_milli(DeviceId(name)) for name in ("a/0", "a/1", "a/2", "gone")}
    assert free == {"a/0": 700, "a/1": 1000, "a/2": 0, "gone": 0}
    assert (room.memory_mib(DeviceId("a/2")), room.memory_mib(DeviceId("gone"))) == (81_920, 0)


def test_a_move_holds_both_places_with_their_cores_and_commits_to_what_a_new_lease_would_hold() -> None:
    some = fleet_of(node("a", 1, "V100", cpu_cores=8), node("b", 1, "A100", cpu_cores=8))
    before = lease("x", "a/0", memory_mib=8_192, cpu_cores=6)
    layout, capacity, room = arrays(some, before)
    offer = resize_memory(before, 40_000, room, NOW)
    assert isinstance(offer, Offer) and offer.moves == (("a/0", "b/0"),)
    capacity.take(part_of_offer(layout, offer))
    assert capacity.milli.sum() == 0
    assert capacity.cpu.tolist() == [2000, 2000]
    taken = accept(offer, NOW)
    assert isinstance(taken, Offer)
    done = commit(taken, before, NOW)
    assert isinstance(done, Resized)
    capacity.give(part_of_offer(layout, offer))
    capacity.give(part_of_lease(layout, before))
    capacity.take(part_of_lease(layout, done.lease))
    _, fresh, _ = arrays(some, done.lease)
    assert np.array_equal(capacity.milli, fresh.milli)
    assert np.array_equal(capacity.cpu, fresh.cpu)


def test_a_move_within_a_node_needs_its_cores_twice_while_both_places_are_at_work() -> None:
    before = lease("x", "a/0", memory_mib=8_192, milli=200, cpu_cores=4)
    other = lease("y", "a/0", milli=500)
    _, _, tight = arrays(fleet_of(node("a", 2, "V100", cpu_cores=7)), before, other)
    assert not isinstance(resize_memory(before, 12_000, tight, NOW), Offer)
    layout, capacity, room = arrays(fleet_of(node("a", 2, "V100", cpu_cores=8)), before, other)
    offer = resize_memory(before, 12_000, room, NOW)
    assert isinstance(offer, Offer)
    capacity.take(part_of_offer(layout, offer))
    assert capacity.cpu.tolist() == [0]


def test_members_join_only_where_their_node_has_cores_for_them() -> None:
    before = lease("x", "a/0", cpu_cores=4)
    for cores, joins in ((8, True), (7, False)):
        _, _, room = arrays(fleet_of(node("a", 2, cpu_cores=cores)), before)
        assert isinstance(resize_members(before, 2, room, NOW), Resized) is joins


def test_growing_in_place_holds_only_the_difference() -> None:
    before = lease("x", "a/0 a/1", memory_mib=4_096, milli=250)
    other = lease("y", "a/1", milli=750)
    layout, _, room = arrays(fleet_of(node("a", 2, "V100"), node("b", 1, "V100")), before, other)
    offer = resize_memory(before, 8_192, room, NOW)
    assert isinstance(offer, Offer) and offer.devices == ("a/0", "b/0")
    part = part_of_offer(layout, offer)
    assert sorted(milli for _, _, milli in part.devices) == [250, 500]
