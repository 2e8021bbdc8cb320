"""The lead is kept while the loop goes on, however slow, and is taken in the moment in which it is free."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.server import lead as module
from airflow_gpu_provider.server.lead import Lead
from airflow_gpu_provider.store.engine import make_engine
from airflow_gpu_provider.store.leadership import Leadership


@pytest.fixture
def engine(settings: Settings) -> Iterator[Engine]:
    engine = make_engine(settings.sql_alchemy_conn)
    yield engine
    engine.dispose()


def leading(engine: Engine, ttl_s: float = 0.3) -> Lead:
    lead = Lead(Leadership(engine, "a", ttl_s))
    assert lead.keep() and lead.term is not None
    return lead


def until_taken(lead: Lead, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not lead.keep():
        assert time.monotonic() < deadline
        time.sleep(lead.wait_s(0.1))


def test_a_turn_that_takes_several_ttls_does_not_cost_the_lead(engine: Engine) -> None:
    lead = leading(engine)
    time.sleep(1.2)
    assert Leadership(engine, "b", 60).acquire() is None
    assert not lead.keep(), "it is the same term"
    lead.close()


def test_a_loop_that_hangs_loses_the_lead_and_notices_when_it_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HANGS_S", 0.2)
    lead = leading(engine)
    other = Lead(Leadership(engine, "b", 60))
    until_taken(other)
    assert other.term is not None
    deadline = time.monotonic() + 20
    while not lead.keep():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert lead.term is None
    other.close()
    lead.close()


def test_who_follows_looks_again_when_the_lead_of_the_other_ends(engine: Engine) -> None:
    dead = Leadership(engine, "a", 0.5)
    dead.acquire()
    follower = Lead(Leadership(engine, "b", 6.0))
    assert not follower.keep()
    assert follower.wait_s(60) <= 0.5 + module._AFTER_S, "not some time after"
    until_taken(follower)
    assert follower.term is not None and follower.term.holder == "b"
    follower.close()


def test_a_lead_that_was_given_back_is_not_renewed_after_it(engine: Engine) -> None:
    lead = leading(engine, ttl_s=0.03)  # a heartbeat each 10 ms
    lead.close()
    time.sleep(0.1)
    assert Leadership(engine, "b", 60).acquire() is not None


def test_after_a_failure_of_the_database_it_looks_at_once(engine: Engine) -> None:
    lead = leading(engine)
    lead.give_up()
    assert lead.term is None and lead.wait_s(60) == 0
    assert lead.keep() and lead.term is not None
    lead.close()
