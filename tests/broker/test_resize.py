"""A running lease grows and shrinks, and no share is ever given twice or lost on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from airflow_gpu_provider.broker.model import ClaimId, DeviceId, GpuRequest, Lease
from airflow_gpu_provider.broker.move import (
    Offer,
    OfferPhase,
    Resized,
    ResizeRefused,
    accept,
    commit,
    held_by,
)
from airflow_gpu_provider.broker.resize import resize_members, resize_memory

from .builders import NOW, claim, lease

GIB = 1024


@dataclass
class SomeRoom:
    """Devices with their memory, and the share that is free; gives the first ones that do."""

    sizes: Mapping[str, int]
    free: Mapping[str, int] = field(default_factory=dict)
    asked: list[GpuRequest] = field(default_factory=list)

    def free_milli(self, device: DeviceId) -> int:
        return self.free.get(device, 0)

    def memory_mib(self, device: DeviceId) -> int:
        return self.sizes.get(device, 0)

    def model(self, device: DeviceId) -> str | None:
        return "V100" if device in self.sizes else None

    def find(self, request: GpuRequest, excluded: Collection[DeviceId]) -> Sequence[DeviceId] | None:
        self.asked.append(request)
        able = [
            DeviceId(name)
            for name, size in self.sizes.items()
            if name not in excluded
            and size >= request.memory_mib
            and self.free.get(name, 0) >= request.milli_on(size)
        ]
        return able[: request.gpus] if len(able) >= request.gpus else None


def resized(found: object) -> Lease:
    assert isinstance(found, Resized), found
    return found.lease


def offered(found: object) -> Offer:
    assert isinstance(found, Offer), found
    return found


def refused(found: object) -> str:
    assert isinstance(found, ResizeRefused), found
    return found.reason


def half(devices: str = "a", **more: Any) -> Lease:
    """8 GiB of a device of 16."""
    shares = (500,) * len(devices.split())
    return replace(lease("x", devices, memory_mib=8 * GIB, milli=125, **more), shares=shares)


def test_memory_grows_in_place_where_its_device_has_it_free() -> None:
    found = resized(resize_memory(half(), 12 * GIB, SomeRoom({"a": 16 * GIB}, {"a": 500}), NOW))
    assert (found.devices, found.request.memory_mib, found.shares) == (("a",), 12 * GIB, (750,))


def test_a_whole_device_gives_all_its_memory_in_place_even_when_it_was_drained() -> None:
    room = SomeRoom({"a": 16 * GIB}, {})
    assert resized(resize_memory(lease("x", "a", memory_mib=GIB), 16 * GIB, room, NOW)).devices == ("a",)
    assert "largest has 16GiB" in refused(resize_memory(lease("x", "a"), 17 * GIB, room, NOW))


def test_where_it_is_not_free_a_move_is_offered_and_both_places_are_held_until_it_is_done() -> None:
    room = SomeRoom({"a": 16 * GIB, "b": 16 * GIB}, {"a": 100, "b": 1000})
    before = half()
    offer = offered(resize_memory(before, 12 * GIB, room, NOW))
    assert offer.moves == (("a", "b"),)
    assert held_by(offer) == (("b", 750),)
    assert "not accepted" in refused(commit(offer, before, NOW))
    taken = accept(offer, NOW + timedelta(seconds=59))
    assert isinstance(taken, Offer) and taken.phase is OfferPhase.ACCEPTED
    done = commit(taken, before, NOW + timedelta(minutes=5))
    assert isinstance(done, Resized)
    assert (done.lease.devices, done.freed, done.lease.shares) == (("b",), ("a",), (750,))
    again = commit(taken, done.lease, NOW + timedelta(days=1))
    assert again == Resized(done.lease), "a repeated commit changes nothing"


def test_an_offer_that_runs_out_leaves_the_old_place() -> None:
    room = SomeRoom({"a": 16 * GIB, "b": 16 * GIB}, {"b": 1000})
    offer = offered(resize_memory(half(), 12 * GIB, room, NOW))
    late = NOW + timedelta(seconds=60)
    assert offer.is_over(late)
    assert "old devices are still held" in refused(accept(offer, late))
    taken = accept(offer, NOW)
    assert isinstance(taken, Offer)
    assert accept(taken, NOW + timedelta(minutes=9)) == taken, "accepting again wins no time"
    assert "ran out at 12:10:00 UTC" in refused(commit(taken, half(), NOW + timedelta(minutes=10)))


def test_only_the_members_that_cannot_stay_move_and_the_others_grow_in_place() -> None:
    room = SomeRoom({"a": 16 * GIB, "b": 16 * GIB, "c": 16 * GIB}, {"a": 500, "c": 1000})
    before = lease("x", "a b", memory_mib=8 * GIB, milli=500, cpu_cores=8, host_memory_mib=101)
    offer = offered(resize_memory(before, 16 * GIB, room, NOW))
    assert offer.devices == ("a", "c")
    assert held_by(offer) == (("a", 500), ("c", 1000))
    (asked,) = room.asked
    assert (asked.gpus, asked.cpu_cores, asked.host_memory_mib) == (1, 4.0, 51)


def test_a_spare_that_cannot_grow_is_given_back_and_not_moved() -> None:
    room = SomeRoom({"a": 16 * GIB, "s": 16 * GIB}, {"a": 500})
    found = resize_memory(half("a s", gpus=1, spares=1), 12 * GIB, room, NOW)
    assert isinstance(found, Resized)
    assert (found.lease.devices, found.freed) == (("a",), ("s",))


def test_memory_is_given_back_at_once_with_the_share_that_it_was() -> None:
    room = SomeRoom({"a": 16 * GIB})
    assert resized(resize_memory(half(), 4 * GIB, room, NOW)).shares == (250,)
    for_compute = lease("x", "a", memory_mib=2 * GIB, milli=500)
    assert resized(resize_memory(for_compute, GIB, room, NOW)).shares == (500,)
    assert resized(resize_memory(for_compute, 8 * GIB, room, NOW)).shares == (500,)


def test_an_open_offer_is_given_again_for_the_same_wish_and_stands_in_the_way_of_others() -> None:
    room = SomeRoom({"a": 16 * GIB, "b": 16 * GIB}, {"b": 1000})
    offer = offered(resize_memory(half(), 12 * GIB, room, NOW))
    assert resize_memory(half(), 12 * GIB, room, NOW, open_offer=offer) == offer
    assert "offered until 12:01:00 UTC" in refused(
        resize_memory(half(), 13 * GIB, room, NOW, open_offer=offer)
    )
    assert "commit or decline" in refused(resize_members(half(), 2, room, NOW, open_offer=offer))
    later = NOW + timedelta(minutes=1)
    assert (
        offered(resize_memory(half(), 13 * GIB, room, later, open_offer=offer)).request.memory_mib == 13 * GIB
    )


def test_an_offer_is_void_once_the_lease_changed() -> None:
    room = SomeRoom({"a": 16 * GIB, "b": 16 * GIB}, {"b": 1000})
    taken = accept(offered(resize_memory(half(), 12 * GIB, room, NOW)), NOW)
    assert isinstance(taken, Offer)
    other = replace(half(), request=replace(half().request, memory_mib=9 * GIB))
    assert "lease changed" in refused(commit(taken, other, NOW))


def test_devices_on_which_the_task_failed_are_not_offered() -> None:
    room = SomeRoom({"a": 16 * GIB, "bad": 16 * GIB, "b": 16 * GIB}, {"bad": 1000, "b": 1000})
    before = replace(half(), claim=claim("x", excluded=["bad"]))
    assert offered(resize_memory(before, 12 * GIB, room, NOW)).devices == ("b",)
    assert resized(resize_members(before, 2, room, NOW)).devices == ("a", "b")


def test_members_join_from_its_spares_first_and_all_or_none() -> None:
    room = SomeRoom({"n": GIB, "m": GIB}, {"n": 1000, "m": 1000})
    before = lease("x", "a b s t", gpus=2, spares=2, cpu_cores=4, host_memory_mib=100)
    three = resized(resize_members(before, 3, room, NOW))
    assert (three.devices, three.request.gpus, three.request.cpu_cores) == (("a", "b", "s", "t"), 3, 6.0)
    six = resized(resize_members(before, 6, room, NOW))
    assert (six.devices, six.request.host_memory_mib) == (("a", "b", "s", "t", "n", "m"), 300)
    assert "no 3 free" in refused(resize_members(before, 7, room, NOW))


def test_members_leave_by_name_or_the_last_ones() -> None:
    before = lease("x", "a b c s", gpus=3, spares=1, cpu_cores=6)
    room = SomeRoom({})
    named = resize_members(before, 2, room, NOW, leave=[DeviceId("a")])
    assert isinstance(named, Resized)
    assert (named.lease.devices, named.freed, named.lease.request.cpu_cores) == (("b", "c", "s"), ("a",), 4.0)
    assert resized(resize_members(before, 1, room, NOW)).devices == ("a", "s")
    for wrong in (["s"], ["a", "b"], ["zz"]):
        told = resize_members(before, 2, room, NOW, leave=[DeviceId(each) for each in wrong])
        assert "name the devices of those that leave" in refused(told)


def test_a_lease_that_is_being_taken_back_gives_but_gets_nothing() -> None:
    room = SomeRoom({"a": 16 * GIB, "b": 16 * GIB}, {"a": 500, "b": 1000})
    ending = replace(half("a c"), ends_for=ClaimId("urgent"))
    assert "taken back for claim urgent" in refused(resize_memory(ending, 12 * GIB, room, NOW))
    assert "taken back" in refused(resize_members(ending, 3, room, NOW))
    assert resized(resize_members(ending, 1, room, NOW)).devices == ("a",)


@pytest.mark.parametrize("wrong", [0, -1])
def test_nothing_is_no_size(wrong: int) -> None:
    assert "ask for 1 or more" in refused(resize_memory(half(), wrong, SomeRoom({}), NOW))
    assert "or release the lease" in refused(resize_members(half(), wrong, SomeRoom({}), NOW))


SIZES = {"a": 8 * GIB, "b": 8 * GIB, "c": 16 * GIB, "d": 16 * GIB}


class ResizingHolders(RuleBasedStateMachine):
    """Holders that resize, accept, commit, dawdle and end in any order, on four devices."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.leases: dict[str, Lease] = {}
        self.offers: dict[str, Offer] = {}
        self.number = 0

    def used(self) -> Counter[str]:
        used: Counter[str] = Counter()
        for each in self.leases.values():
            used.update({str(device): milli for device, milli in zip(each.devices, each.milli, strict=True)})
        for offer in self.offers.values():
            if not offer.is_over(self.now):
                used.update({str(device): milli for device, milli in held_by(offer)})
        return used

    def room(self) -> SomeRoom:
        used = self.used()
        return SomeRoom(SIZES, {name: 1000 - used[name] for name in SIZES})

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.leases)))

    @rule(
        memory=st.sampled_from([1, 3, 4, 6]),
        gpus=st.integers(1, 2),
        spares=st.integers(0, 1),
        whole=st.booleans(),
    )
    def begin(self, memory: int, gpus: int, spares: int, whole: bool) -> None:
        wish = GpuRequest(gpus=gpus, memory_mib=memory * GIB, milli=1000 if whole else 200, spares=spares)
        found = self.room().find(replace(wish, gpus=gpus + spares), frozenset())
        if found is not None:
            self.number += 1
            name = f"l{self.number}"
            shares = () if whole else tuple(wish.milli_on(SIZES[device]) for device in found)
            self.leases[name] = replace(lease(name, " ".join(found)), request=wish, shares=shares)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), memory=st.integers(1, 17))
    def ask_memory(self, data: st.DataObject, memory: int) -> None:
        name = self.pick(data)
        before, open_offer = self.leases[name], self.offers.get(name)
        found = resize_memory(before, memory * GIB, self.room(), self.now, open_offer=open_offer)
        if isinstance(found, Resized):
            self.leases[name] = found.lease
            assert found.lease.request.memory_mib == memory * GIB
            assert all(SIZES[device] >= memory * GIB for device in found.lease.devices)
            assert found.lease.devices[: before.request.gpus] == before.devices[: before.request.gpus]
        elif isinstance(found, Offer):
            self.offers[name] = found
            assert self.leases[name] == before, "an offer leaves the lease as it is"

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), gpus=st.integers(1, 4))
    def ask_members(self, data: st.DataObject, gpus: int) -> None:
        name = self.pick(data)
        found = resize_members(
            self.leases[name], gpus, self.room(), self.now, open_offer=self.offers.get(name)
        )
        if isinstance(found, Resized):
            self.leases[name] = found.lease
            assert found.lease.request.gpus == gpus

    @precondition(lambda self: self.offers)
    @rule(data=st.data())
    def say_yes(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.offers)))
        found = accept(self.offers[name], self.now)
        if isinstance(found, Offer):
            self.offers[name] = found

    @precondition(lambda self: self.offers)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.offers)))
        offer, before = self.offers[name], self.leases[name]
        found = commit(offer, before, self.now)
        if isinstance(found, Resized):
            assert offer.phase is OfferPhase.ACCEPTED and not offer.is_over(self.now)
            self.leases[name] = found.lease
            del self.offers[name]
            assert set(before.devices) == (set(found.lease.devices) & set(before.devices)) | set(found.freed)

    @rule(seconds=st.sampled_from([1, 59, 61, 600]))
    def wait(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = self.pick(data)
        del self.leases[name]
        self.offers.pop(name, None)

    @invariant()
    def no_share_is_given_twice(self) -> None:
        assert all(milli <= 1000 for milli in self.used().values()), self.used()

    @invariant()
    def every_lease_has_its_members_each_on_a_device_of_its_own(self) -> None:
        for each in self.leases.values():
            assert len(set(each.devices)) == len(each.devices) >= each.request.gpus


ResizingHolders.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much],
)
test_no_share_is_given_twice_or_lost_whatever_holders_do = ResizingHolders.TestCase
