"""Every replica goes by the database's clock: no machine's own clock, wrong or moved, costs a lease."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.exceptions import BrokerUnavailable
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.auth import lease_secret
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.clock import BrokerClock, utc_now
from airflow_gpu_provider.wire import RenewBody

from .conftest import SECRET, ask, look, report, until_leading

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)


class World:
    """A machine whose clock is `skew` ahead of the database's, and how long it runs."""

    def __init__(self, skew: timedelta = timedelta()) -> None:
        self.skew, self.monotonic_s, self.database_ahead = skew, 1000.0, timedelta()

    @property
    def database_now(self) -> datetime:
        return START + timedelta(seconds=self.monotonic_s) + self.database_ahead

    def clock(self, *, follows: bool = True) -> BrokerClock:
        wall = lambda: self.database_now + self.skew  # noqa: E731
        return BrokerClock(follows=follows, wall=wall, monotonic=lambda: self.monotonic_s)

    def ask(self, clock: BrokerClock, *, there_s: float = 0.0, back_s: float = 0.0) -> None:
        asked_at = self.monotonic_s
        self.monotonic_s += there_s
        stamp = self.database_now
        self.monotonic_s += back_s
        clock.hear(stamp, asked_at, self.monotonic_s)


trips = st.lists(st.tuples(*[st.floats(0, 3)] * 3), min_size=1, max_size=12)


@given(trips, st.integers(-7200, 7200))
def test_a_clock_is_never_further_off_than_half_its_first_round_trip_and_never_goes_back(
    trips: list[tuple[float, float, float]], skew_s: int
) -> None:
    world = World(timedelta(seconds=skew_s))
    clock = world.clock()
    before = None
    for there_s, back_s, pause_s in trips:
        world.ask(clock, there_s=there_s, back_s=back_s)
        now = clock()
        first_s = sum(trips[0][:2])
        assert abs((now - world.database_now).total_seconds()) <= first_s / 2 + 1e-4
        assert before is None or now >= before
        before = now
        world.monotonic_s += pause_s


def test_half_the_round_trip_is_taken_for_the_way_back() -> None:
    world = World(HOUR)
    clock = world.clock()
    world.ask(clock, there_s=0.5, back_s=0.5)
    assert clock() == world.database_now


def test_nothing_is_decided_before_the_database_told_the_time() -> None:
    with pytest.raises(BrokerUnavailable, match="ask again"):
        World().clock()()


@pytest.mark.parametrize("follows", [True, False])
def test_a_wall_clock_that_is_moved_harms_nothing(follows: bool, caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    clock = world.clock(follows=follows)
    world.ask(clock)
    for skew in (HOUR, -HOUR):
        world.skew = skew
        before = clock()
        world.monotonic_s += 10
        if not follows:  # SQLite has no clock of its own: what it tells is the machine's
            clock.hear(world.database_now + skew, world.monotonic_s, world.monotonic_s)
        else:
            world.ask(clock)
        assert clock() - before == timedelta(seconds=10)


def test_a_clock_that_is_far_off_is_told_once_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    world = World(timedelta(seconds=4))
    clock = world.clock()
    world.ask(clock)
    assert caplog.messages == []
    world.skew = -HOUR
    for _ in range(3):
        world.ask(clock)
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert "3600 s behind the database's" in told.message and "NTP" in told.message


def test_when_the_database_changes_its_clock_all_follow_it_and_begin_anew() -> None:
    world, steps = World(), []
    clock = world.clock()
    clock.on_step = lambda: steps.append(1)
    world.ask(clock)
    clock()
    for ahead in (HOUR, -HOUR):
        world.database_ahead = ahead
        world.ask(clock)
        assert clock() == world.database_now
    assert len(steps) == 2
    world.database_ahead -= timedelta(seconds=0.5)
    before = clock()
    world.ask(clock)
    assert clock() == before, "a little is waited for, so that nothing goes back"
    assert len(steps) == 2


@pytest.fixture
def quick(migrated_postgres_url: str) -> Settings:
    return Settings(
        token_secret=SECRET, sql_alchemy_conn=migrated_postgres_url, stale_after_s=600, leader_ttl_s=1.0
    )


@pytest.fixture(params=[HOUR, -HOUR], ids=["ahead", "behind"])
def wrong(quick: Settings, request: pytest.FixtureRequest) -> Iterator[Broker]:
    """Yield a replica on a machine whose clock is an hour wrong."""
    broker = Broker(quick, clock=BrokerClock(follows=True, wall=lambda: utc_now() + request.param))
    yield broker
    broker.stop()


def test_a_leader_whose_clock_is_an_hour_wrong_loses_no_lease_and_keeps_no_dead_one(
    quick: Settings, wrong: Broker
) -> None:
    leader = Broker(quick.model_copy(update={"lease_ttl_s": 6.0}))
    leader.start()
    until_leading(leader)
    leader.report(ReportBody(nodes=(report(),)))
    dead, living = ask(leader, "dead"), ask(leader, "living")
    for claim_id in (dead, living):
        look(leader, claim_id, "granted")
        held = asyncio.run(leader.collect(claim_id)).held
        assert held is not None
    wrong.start()
    leader.stop()
    until_leading(wrong)
    assert held is not None
    renewal = RenewBody(secret=lease_secret(SECRET, held.lease_id, 1), epoch=1)
    until_at = asyncio.run(wrong.renew(held.lease_id, renewal)).expires_at
    assert abs((until_at - utc_now()).total_seconds() - quick.lease_ttl_s) < 30
    ended = look(wrong, dead, "ended")
    assert (ended.state.value, ended.reason_code) == ("ended", "expired")
    time.sleep(0.3)  # some turns
    assert look(wrong, living, "granted").state.value == "granted"
