"""Reserved devices are there for their owner in time, and not idle until then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.broker.model import Claim, DeviceId, Lease
from airflow_gpu_provider.broker.reservation import (
    Kept,
    Reservation,
    closed_to,
    conflict,
    in_the_way,
    keep,
    overstayers,
    reopenings,
)
from airflow_gpu_provider.exceptions import InvalidRequest

from .builders import NOW, claim, fleet, fleet_of, lease, node

quick = settings(max_examples=150, deadline=None)


def reservation(
    name: str = "r",
    *,
    in_h: float = 2,
    for_h: float = 2,
    devices: str = "",
    team: str | None = "vision",
    **more: Any,
) -> Reservation:
    start = NOW + timedelta(hours=in_h)
    return Reservation(
        id=name,
        starts_at=start,
        ends_at=start + timedelta(hours=for_h),
        by="ada",
        team=team,
        devices=frozenset(DeviceId(each) for each in devices.split()),
        **more,
    )


def of_team(team: str | None, max_runtime_s: float | None = None, dag_id: str | None = None) -> Claim:
    return replace(claim("c", max_runtime_s=max_runtime_s), team=team, dag_id=dag_id)


def held_by(team: str | None, name: str, devices: str, **more: Any) -> Lease:
    return replace(lease(name, devices, **more), claim=replace(claim(name), team=team))


def names(kept: Iterable[Kept]) -> list[str]:
    return sorted(str(device) for each in kept for device in each.devices)


def test_others_may_use_reserved_devices_only_if_they_end_in_time() -> None:
    kept = keep([reservation(in_h=2, devices="n0/0")], fleet(1), [], NOW)
    assert not closed_to(of_team("text", 2 * 3600), kept, NOW)
    assert closed_to(of_team("text", 2 * 3600 + 1), kept, NOW) == {"n0/0"}
    assert not closed_to(of_team("text"), kept, NOW), "the start is still further away than the notice"
    assert closed_to(of_team("text"), kept, NOW, notice=timedelta(hours=3)) == {"n0/0"}


def test_the_owner_may_always_use_them_and_nobody_else_once_it_has_started() -> None:
    kept = keep([reservation(in_h=-1, devices="n0/0")], fleet(1), [], NOW)
    assert not closed_to(of_team("vision", 1e9), kept, NOW)
    assert closed_to(of_team("text", 1), kept, NOW) == {"n0/0"}
    assert closed_to(of_team(None), kept, NOW) == {"n0/0"}


def test_a_reservation_for_a_dag_is_not_for_the_whole_team() -> None:
    kept = keep([reservation(in_h=-1, devices="n0/0", dag_id="nightly")], fleet(1), [], NOW)
    assert not closed_to(of_team("vision", dag_id="nightly"), kept, NOW)
    assert closed_to(of_team("vision", dag_id="other"), kept, NOW)
    assert closed_to(of_team("text", dag_id="nightly"), kept, NOW)


def test_what_is_over_keeps_nothing() -> None:
    assert keep([reservation(in_h=-3, for_h=3, devices="n0/0")], fleet(1), [], NOW) == ()


def test_a_number_of_a_model_is_kept_where_it_will_be_free() -> None:
    some = fleet_of(node("a", 4, bad={3: "XID 79"}), node("v", 4, "V100"))
    leases = [
        held_by("text", "long", "a/0"),
        held_by("text", "short", "a/1", max_runtime_s=600),
        held_by("vision", "own", "a/2"),
    ]
    one = keep([reservation(number=1, model="A100")], some, leases, NOW)
    assert names(one) == ["a/2"], "what the owner has already is kept first"
    two = keep([reservation(number=2, model="A100")], some, leases, NOW)
    assert names(two) == ["a/1", "a/2"]
    three = keep([reservation(number=3, model="A100")], some, leases, NOW)
    assert names(three) == ["a/0", "a/1", "a/2"], "what overstays is still better than what is broken"


def test_devices_of_one_node_are_kept_together() -> None:
    leases = [held_by("text", "x", "n0/0")]
    assert names(keep([reservation(number=4)], fleet(2), leases, NOW)) == ["n1/0", "n1/1", "n1/2", "n1/3"]


def test_overlapping_reservations_keep_different_devices_and_later_ones_the_same_again() -> None:
    first, second = reservation("a", number=2), reservation("b", in_h=3, number=2)
    later = reservation("c", in_h=10, number=4)
    kept = keep([first, second, later], fleet(1), [], NOW)
    by_id = {each.reservation.id: each.devices for each in kept}
    assert not by_id["a"] & by_id["b"]
    assert by_id["c"] == {"n0/0", "n0/1", "n0/2", "n0/3"}


def test_named_devices_are_never_given_to_a_number() -> None:
    named = reservation("z", in_h=3, devices="n0/0 n0/1")
    kept = keep([reservation("a", number=2), named], fleet(1), [], NOW)
    assert {each.reservation.id: each.devices for each in kept}["a"] == {"n0/2", "n0/3"}


def test_leases_of_others_that_overstay_are_named_and_the_owners_are_not() -> None:
    leases = [
        held_by("text", "late", "n0/0"),
        held_by("vision", "own", "n0/1"),
        held_by("text", "far", "n0/3"),
    ]
    kept = keep([reservation(in_h=-1, devices="n0/0 n0/1 n0/2")], fleet(1), leases, NOW)
    assert overstayers(kept, leases, NOW) == {"lease-late"}
    soon = keep([reservation(in_h=1, devices="n0/0")], fleet(1), leases, NOW)
    assert overstayers(soon, leases, NOW) == frozenset()


def test_who_is_kept_off_hears_for_whom_until_when_and_what_to_do() -> None:
    kept = keep([reservation(in_h=1, devices="n0/0 n0/1")], fleet(1), [], NOW)
    closed = closed_to(of_team("text"), kept, NOW)
    assert in_the_way(of_team("text"), kept, closed, NOW) == (
        "2 reserved by ada for team vision from 2026-03-01 13:00 UTC until 2026-03-01 15:00 UTC (r): "
        "a max_runtime that ends before that start would let it pass"
    )
    later = NOW + timedelta(hours=1)
    assert in_the_way(of_team("text"), kept, closed, later).endswith("starts when that ends, or on others")


def test_devices_come_back_when_the_last_reservation_in_the_way_is_over() -> None:
    kept = keep(
        [
            reservation("a", in_h=-1, for_h=2, devices="n0/0"),
            reservation("b", in_h=-1, for_h=3, devices="n0/1"),
            reservation("c", in_h=1, for_h=4, devices="n0/0"),
        ],
        fleet(1),
        [],
        NOW,
    )
    assert reopenings(of_team("text"), kept, NOW) == [(2 * 3600.0, {"n0/1"}), (5 * 3600.0, {"n0/0"})]
    assert reopenings(of_team("vision"), kept, NOW) == []


def test_a_choice_does_not_wander_while_it_is_as_good_as_another() -> None:
    number = [reservation(number=2)]
    busy = [held_by("text", "x", "n0/0 n0/1")]
    first = keep(number, fleet(2), busy, NOW)
    assert names(first) == ["n1/0", "n1/1"], "the node with most free devices"
    before = {each.reservation.id: each.devices for each in first}
    others = [held_by("text", "y", "n1/2 n1/3")]
    assert names(keep(number, fleet(2), others, NOW)) == ["n0/0", "n0/1"]
    assert keep(number, fleet(2), others, NOW, before) == first
    late = [held_by("text", "z", "n1/0")]
    assert names(keep(number, fleet(2), late, NOW, before)) == ["n0/0", "n1/1"], "only what became worse"


def test_a_lease_that_broke_its_promise_is_not_counted_on() -> None:
    held = replace(held_by("text", "late", "n0/0", max_runtime_s=60), granted_at=NOW - timedelta(hours=1))
    before = {"r": frozenset({DeviceId("n0/0")})}
    assert names(keep([reservation(number=1)], fleet(1), [held], NOW, before)) == ["n0/1"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"for_h": 0, "number": 1}, "give a later end"),
        ({}, "name devices, or give a number"),
        ({"devices": "n0/0", "number": 1}, "not both"),
        ({"number": 1, "team": None}, "is for nobody"),
        ({"number": 1, "team": ""}, "empty team: give a name"),
        ({"number": 1, "dag_id": " "}, "empty dag_id: give a name"),
        ({"number": 1, "model": ""}, "empty model: give a name"),
        ({"devices": "n0/0", "model": "A100"}, "names devices and model=A100: leave the model out"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_write(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        reservation(**wrong)


def test_a_new_reservation_that_cannot_be_kept_is_refused_with_numbers() -> None:
    some = fleet_of(node("a", 4), node("v", 2, "V100"))
    others = [reservation("night", number=3, model="A100"), reservation("named", devices="v/0")]
    assert conflict(reservation("new", number=1, model="A100"), others, some) is None
    assert conflict(reservation("new", number=2, model="A100", in_h=9), others, some) is None
    assert conflict(reservation("night", number=4, model="A100"), others, some) is None, "itself is no rival"
    told = conflict(reservation("new", number=2, model="A100"), others, some)
    assert told is not None and told.startswith("asked 2 x A100; the fleet has 4, 3 of them may be taken")
    unlike = conflict(reservation("new", number=1, model="H100"), others, some)
    assert unlike is not None and unlike.startswith("the fleet has no H100: it has ")
    assert "no device x/0" in (conflict(reservation("new", devices="x/0"), others, some) or "")
    assert "v/0 is reserved by named" in (conflict(reservation("new", devices="v/0"), others, some) or "")


windows = st.lists(
    st.builds(
        reservation,
        st.text("abcdef", min_size=1, max_size=3),
        in_h=st.integers(-2, 6),
        for_h=st.integers(1, 4),
        number=st.integers(1, 4),
        model=st.sampled_from([None, "A100", "V100"]),
        team=st.sampled_from(["vision", "text"]),
    ),
    max_size=4,
    unique_by=lambda each: each.id,
)


@given(some=windows, data=st.data())
@quick
def test_who_promises_to_end_in_time_does_and_a_reservation_that_was_free_of_others_stays_so(
    some: list[Reservation], data: st.DataObject
) -> None:
    """Claims of a third team are let in where allowed; at no start does one sit on what is kept."""
    own = fleet_of(node("a", 3), node("v", 3, "V100"))
    all_devices = [device.id for each in own.nodes for device in each.devices]
    leases: list[Lease] = []
    for hour in range(7):
        now = NOW + timedelta(hours=hour)
        leases = [each for each in leases if each.ends_by is not None and each.ends_by > now]
        kept = keep(some, own, leases, now)
        if sum(each.number for each in some) <= 3:
            assert not overstayers(kept, leases, now)
        guest = of_team("third", data.draw(st.integers(1, 5)) * 3600.0)
        busy = {device for each in leases for device in each.devices}
        open_now = [name for name in all_devices if name not in busy | closed_to(guest, kept, now)]
        if open_now:
            got = data.draw(st.sampled_from(open_now))
            leases.append(
                replace(
                    lease(f"g{hour}", got, max_runtime_s=guest.request.max_runtime_s),
                    claim=guest,
                    granted_at=now,
                )
            )


@given(some=windows)
@quick
def test_no_device_is_kept_for_two_at_once(some: list[Reservation]) -> None:
    kept = keep(some, fleet(1, 6), [], NOW)
    for one in kept:
        for two in kept:
            if one is not two and one.reservation.overlaps(two.reservation):
                assert not one.devices & two.devices


@given(some=windows, busy=st.lists(st.integers(0, 5), max_size=4, unique=True), hours=st.integers(0, 6))
@quick
def test_to_choose_again_changes_nothing(some: list[Reservation], busy: list[int], hours: int) -> None:
    leases = [held_by("text" if number % 2 else "vision", f"l{number}", f"n0/{number}") for number in busy]
    now = NOW + timedelta(hours=hours)
    first = keep(some, fleet(1, 6), leases, now)
    assert (
        keep(some, fleet(1, 6), leases, now, {each.reservation.id: each.devices for each in first}) == first
    )
