from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

from sqlalchemy import Engine

from airflow_gpu_provider.store.leadership import Leadership, database_now


def test_one_of_many_replicas_leads(engine: Engine) -> None:
    replicas = [Leadership(engine, f"replica-{i}", ttl_s=60) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        terms = [term for term in pool.map(lambda r: r.acquire(), replicas) if term]
    assert len(terms) == 1
    assert replicas[0].current() == terms[0].holder


def test_a_leader_keeps_its_term_while_it_renews(engine: Engine) -> None:
    leader = Leadership(engine, "a", ttl_s=60)
    first, again = leader.acquire(), leader.acquire()
    assert first == again
    assert Leadership(engine, "b", ttl_s=60).acquire() is None


def test_a_silent_leader_is_replaced_in_a_new_term(engine: Engine) -> None:
    first = Leadership(engine, "a", ttl_s=0.2).acquire()
    time.sleep(0.3)
    second = Leadership(engine, "b", ttl_s=60).acquire()
    assert first is not None and second is not None
    assert (second.holder, second.number) == ("b", first.number + 1)
    assert Leadership(engine, "a", ttl_s=60).acquire() is None


def test_a_leader_that_was_away_too_long_comes_back_in_a_new_term(engine: Engine) -> None:
    leader = Leadership(engine, "a", ttl_s=0.2)
    first = leader.acquire()
    time.sleep(0.3)
    second = leader.acquire()
    assert first is not None and second is not None and second.number == first.number + 1


def test_nobody_leads_after_a_resignation(engine: Engine) -> None:
    leader = Leadership(engine, "a", ttl_s=60)
    term = leader.acquire()
    assert term is not None
    leader.resign(term)
    assert leader.current() is None
    assert Leadership(engine, "b", ttl_s=60).acquire() is not None


def test_a_lead_is_renewed_in_its_term_and_never_after_another_took_it(engine: Engine) -> None:
    first = Leadership(engine, "a", ttl_s=0.2)
    term = first.acquire()
    assert term is not None and first.renew(term)
    time.sleep(0.3)
    assert first.renew(term), "late, but nobody has taken it"
    time.sleep(0.3)
    second = Leadership(engine, "b", ttl_s=60)
    assert second.acquire() is not None
    assert not first.renew(term)
    assert second.current() == "b"


def test_who_does_not_lead_knows_how_long_the_other_still_does(engine: Engine) -> None:
    Leadership(engine, "a", ttl_s=60).acquire()
    other = Leadership(engine, "b", ttl_s=60)
    assert other.acquire() is None
    assert other.free_in_s is not None and 0 < other.free_in_s <= 60


def test_whoever_looks_at_the_election_hears_the_time_of_the_database(engine: Engine) -> None:
    first, other = Leadership(engine, "a", ttl_s=60), Leadership(engine, "b", ttl_s=60)
    heard: list[datetime] = []

    def hear(stamp: datetime, asked_at: float, answered_at: float) -> None:
        assert answered_at >= asked_at
        heard.append(stamp)

    first.hear = other.hear = hear
    term = first.acquire()
    assert term is not None and len(heard) == 1
    assert other.acquire() is None and len(heard) == 2
    assert first.renew(term) and len(heard) == 3
    with engine.connect() as connection:
        heard.append(database_now(connection))
    assert heard == sorted(heard), "the time, not when the lead ends"
