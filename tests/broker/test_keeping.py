"""Reservations in the engine: others are kept off in time, the owner gets its devices at the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.broker import keeping
from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import (
    Claim,
    CyclePolicy,
    DeviceId,
    Fleet,
    Lease,
    LeaseId,
    Placement,
    ReasonCode,
)
from airflow_gpu_provider.broker.move import Resized
from airflow_gpu_provider.broker.reservation import Kept, Reservation, keep
from airflow_gpu_provider.broker.resize import Wish

from .builders import NOW, claim, fleet, fleet_of, lease, node, placed

FOR_EVER = timedelta(days=30)
HOUR = 3600.0


def overstayers(engine: Engine, now: datetime) -> frozenset[LeaseId]:
    return engine.keeping.overstayers(engine.floor.holdings, now)


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def reserved(
    devices: str = "", *, start: float = 0, length: float = HOUR, number: int = 0, team: str = "vision"
) -> Reservation:
    names = frozenset(map(DeviceId, devices.split()))
    return Reservation("r", at(start), at(start + length), by="ada", team=team, devices=names, number=number)


def of_team(team: str | None, name: str = "c", gpus: int = 1, **more: object) -> Claim:
    return replace(claim(name, gpus, **more), team=team)  # type: ignore[arg-type]


def engine_with(some: Fleet, *reservations: Reservation, leases: Sequence[Lease] = ()) -> Engine:
    engine = Engine(CyclePolicy(), some, [replace(each, expires_at=NOW + FOR_EVER) for each in leases])
    engine.reserve(reservations)
    return engine


def written(placement: Placement, asker: Claim, now: datetime) -> Lease:
    devices = placement.devices + placement.spares
    return Lease(LeaseId(f"l-{asker.id}"), asker.id, devices, asker.request, now, NOW + FOR_EVER, claim=asker)


def test_a_claim_that_waits_for_a_reservation_starts_when_it_ends_and_is_told_so() -> None:
    engine = engine_with(fleet(1, 2), reserved("n0/0 n0/1"))
    engine.submit(of_team("text"))
    assert not engine.turn(NOW).placements
    (told,) = engine.waiting(NOW)
    assert told.reason.code is ReasonCode.RESERVED
    assert told.reason.text == (
        "asked 1 GPU; of 2 suitable devices 0 free, 2 reserved for others; 2 reserved by ada for team vision "
        "from 2026-03-01 12:00 UTC until 2026-03-01 13:00 UTC (r): starts when that ends, or on others"
    )
    assert told.starts_in_s == HOUR
    assert not engine.turn(at(HOUR - 1)).placements
    assert placed(engine.turn(at(HOUR))) == {"c": ["n0/0"]}


def test_what_is_reserved_is_no_reason_to_reject() -> None:
    engine = engine_with(fleet(1, 2), reserved("n0/0 n0/1"))
    engine.submit(of_team("text", gpus=2))
    assert not engine.turn(NOW).rejections


def test_the_owner_starts_on_what_is_reserved_while_others_wait() -> None:
    engine = engine_with(fleet(1, 1), reserved("n0/0"))
    engine.submit(of_team("text", "first", value=100))
    engine.submit(of_team("vision", "own"))
    assert placed(engine.turn(NOW)) == {"own": ["n0/0"]}


def test_a_reservation_that_is_taken_back_opens_its_devices_at_once() -> None:
    engine = engine_with(fleet(1, 1), reserved("n0/0"))
    engine.submit(of_team("text"))
    assert not engine.turn(NOW).placements
    engine.reserve(())
    assert placed(engine.turn(at(1))) == {"c": ["n0/0"]}


@pytest.mark.parametrize(
    ("runtime_s", "start", "closed_after"),
    [pytest.param(600.0, 1000, 400, id="promise"), pytest.param(None, 5000, 1399, id="notice")],
)
def test_a_blocked_head_lets_go_of_a_device_that_is_closed_to_it_by_now(
    runtime_s: float | None, start: float, closed_after: float
) -> None:
    busy = lease("busy", "n0/1")
    engine = engine_with(fleet(1, 2), reserved("n0/0", start=start), leases=[busy])
    engine.submit(of_team("text", "head", gpus=2, value=100, max_runtime_s=runtime_s))
    engine.submit(of_team("vision", "own"))
    assert not engine.turn(NOW).placements, "the head holds the free device"
    assert not engine.turn(at(closed_after)).placements
    assert placed(engine.turn(at(closed_after + 1))) == {"own": ["n0/0"]}


def test_a_drained_device_is_replaced_by_another_and_free_for_others_when_it_is_back() -> None:
    engine = engine_with(fleet(1, 2), reserved(number=1))
    engine.turn(NOW)
    assert [set(each.devices) for each in engine.keeping.kept] == [{"n0/0"}]
    engine.set_fleet(fleet_of(node("n0", 2, bad={0: "drained"})), NOW)
    engine.submit(of_team("text"))
    assert not engine.turn(at(1)).placements
    assert [set(each.devices) for each in engine.keeping.kept] == [{"n0/1"}]
    engine.set_fleet(fleet(1, 2), at(2))
    assert placed(engine.turn(at(2))) == {"c": ["n0/0"]}


def test_who_overstays_is_named_until_the_lease_ends() -> None:
    guest = of_team("text", "guest")
    held = replace(lease("guest", "n0/0"), claim=guest)
    engine = engine_with(fleet(1, 1), reserved("n0/0", start=60), leases=[held])
    engine.turn(NOW)
    assert overstayers(engine, NOW) == frozenset()
    engine.turn(at(60))
    assert overstayers(engine, at(60)) == {"lease-guest"}
    engine.end(LeaseId("lease-guest"))
    engine.turn(at(61))
    assert overstayers(engine, at(61)) == frozenset()


def test_turns_choose_nothing_while_nothing_that_matters_happens() -> None:
    engine = engine_with(fleet(2, 4), reserved(number=2, start=60, length=100))
    engine.turn(NOW)
    chosen = engine.keeping.kept
    guest = of_team("text", "guest")
    engine.submit(guest)
    (placement,) = engine.turn(at(1)).placements
    engine.granted(placement, written(placement, guest, at(1)))
    engine.turn(at(2))
    assert engine.keeping.kept is chosen


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[datetime]:
    """When devices were chosen anew, which looks at all of them."""
    found: list[datetime] = []

    def counted(*args: Any) -> tuple[Kept, ...]:
        found.append(args[3])
        return keep(*args)

    monkeypatch.setattr(keeping, "keep", counted)
    return found


def test_load_and_artifacts_alone_choose_nothing_anew(choices: list[datetime]) -> None:
    engine = engine_with(fleet(2, 4), reserved(number=2))
    engine.turn(NOW)
    loaded = node("n1", load=0.5)
    for second, changed in enumerate((loaded, replace(loaded, artifacts=frozenset({"/a"})))):
        engine.set_fleet(fleet_of(node("n0"), changed), at(second))
        engine.turn(at(second))
    assert choices == [NOW]
    engine.set_fleet(fleet_of(node("n0"), node("n1", bad={0: "XID 79"})), at(2))
    engine.turn(at(2))
    assert choices == [NOW, at(2)], "a failed device is seen at once"


def test_leases_let_devices_be_chosen_anew_at_most_once_a_second(choices: list[datetime]) -> None:
    """All devices are busy without an end, so each lease that goes may be the better place."""
    guests = [replace(lease(f"x{i}", f"n0/{i}"), claim=of_team("text", f"x{i}")) for i in range(8)]
    engine = engine_with(fleet(1, 8), reserved(number=4, start=9 * HOUR), leases=guests)
    engine.turn(NOW)
    for number in range(4):
        engine.end(guests[7 - number].id)
        engine.turn(at(0.1 * (number + 1)))
    assert choices == [NOW]
    engine.turn(at(1))
    engine.turn(at(2))
    assert choices == [NOW, at(1)], "what went meanwhile is looked at, and once is enough"
    assert {name for each in engine.keeping.kept for name in each.devices} == {f"n0/{i}" for i in range(4, 8)}


@given(
    asked=st.lists(
        st.tuples(
            st.integers(0, 5000),
            st.integers(1, 3),
            st.sampled_from([None, 300.0, 1500.0, 4000.0]),
            st.sampled_from(["text", None]),
        ),
        max_size=8,
    ),
    number=st.integers(1, 4),
    is_named=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_the_owner_gets_its_devices_at_the_start_if_nobody_overstays(
    asked: list[tuple[int, int, float | None, str | None]], number: int, is_named: bool
) -> None:
    """Guests come before the start at 5000 s; those that promised end as they promised."""
    names = " ".join(f"n0/{index}" for index in range(number)) if is_named else ""
    reservation = reserved(names, start=5000, number=0 if is_named else number)
    engine = engine_with(fleet(2, 4), reservation)
    claims = {
        f"g{order}": (second, of_team(team, f"g{order}", gpus, max_runtime_s=runtime))
        for order, (second, gpus, runtime, team) in enumerate(asked)
    }
    live: dict[str, tuple[float, Lease]] = {}
    for second in sorted({0, 4999, 5000, *(second for second, _ in claims.values()), *range(0, 5000, 100)}):
        for name, (ends, held) in list(live.items()):
            if ends <= second:
                engine.end(held.id)
                del live[name]
        for arrives, guest in claims.values():
            if arrives == second:
                engine.submit(guest)
        if second == 5000:
            engine.submit(of_team("vision", "owner", number, value=1e6))
        for placement in engine.turn(at(second)).placements:
            asker = of_team("vision", "owner", number)
            if placement.claim_id == "owner":
                return
            asker = claims[placement.claim_id][1]
            held = written(placement, asker, at(second))
            engine.granted(placement, held)
            live[asker.id] = (second + (asker.request.max_runtime_s or 1e9), held)
    assert overstayers(engine, at(5000)), "nobody is in the way, and the owner waits"


def test_a_lease_grows_into_what_is_reserved_only_for_its_owner() -> None:
    for team, devices in (("text", 1), ("vision", 2)):
        own = replace(lease("x", "n0/0"), claim=of_team(team, "x"))
        engine = engine_with(fleet(1, 2), reserved("n0/1"), leases=[own])
        engine.turn(NOW)
        found = engine.resizing.resize(own.id, Wish(gpus=2), NOW)
        assert isinstance(found, Resized) == (devices == 2), found
