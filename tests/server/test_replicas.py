"""Two replicas on one PostgreSQL: any takes requests, one decides, the other takes over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.exceptions import BrokerUnavailable, LeaseLost
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.auth import lease_secret
from airflow_gpu_provider.server.board import Entry
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.wire import ClaimState, ReleaseBody, RenewBody
from tests.stored_rows import counts

from .conftest import SECRET, ask, report, until_leading

#: (leader, follower)
Replicas = tuple[Broker, Broker]


def until(check: Callable[[], bool], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def replicas(migrated_postgres_url: str) -> Iterator[Replicas]:
    """Yield (leader, follower); the agent of the only node talks to the follower."""
    settings = Settings(
        token_secret=SECRET, sql_alchemy_conn=migrated_postgres_url, stale_after_s=600, leader_ttl_s=1.0
    )
    leader, follower = Broker(settings), Broker(settings)
    leader.start()
    until_leading(leader)
    follower.start()
    follower.report(ReportBody(nodes=(report(),)))
    until(lambda: bool(leader.mirror.stored()), "the leader hears of a node that reports to the follower")
    yield leader, follower
    follower.stop()
    leader.stop()


def look(broker: Broker, claim_id: str) -> Entry:
    return asyncio.run(broker.find(claim_id))


def until_granted(broker: Broker, claim_id: str) -> Entry:
    until(lambda: look(broker, claim_id).state is ClaimState.GRANTED, "not granted")
    entry = asyncio.run(broker.collect(claim_id))
    assert entry.held is not None
    return entry


def release(broker: Broker, entry: Entry, **told: float) -> None:
    assert entry.held is not None
    secret = lease_secret(SECRET, entry.held.lease_id, entry.held.epoch)
    body = ReleaseBody(secret=secret, epoch=entry.held.epoch, **told)
    asyncio.run(broker.release(entry.held.lease_id, body))


def test_a_request_to_the_follower_is_decided_by_the_leader(replicas: Replicas) -> None:
    leader, follower = replicas
    first = until_granted(follower, ask(follower, "one", gpus=2))
    assert not follower.desk.is_open, "it does not decide"
    waiting = ask(leader, "two", gpus=1)
    until(lambda: look(follower, waiting).reason is not None, "the follower hears why a claim waits")
    release(follower, first)
    second = until_granted(leader, waiting)
    assert second.held is not None and len(second.held.devices) == 1
    assert counts(leader.repository) == (0, 1, 1)


def test_the_follower_renews_and_cancels_what_the_leader_gave(replicas: Replicas) -> None:
    leader, follower = replicas
    entry = until_granted(leader, ask(leader, "one"))
    assert entry.held is not None
    lease_id = entry.held.lease_id
    renewal = RenewBody(secret=lease_secret(SECRET, lease_id, 1), epoch=1)
    until_at = asyncio.run(follower.renew(lease_id, renewal)).expires_at
    until(
        lambda: (held := look(leader, entry.claim_id).held) is not None and held.expires_at == until_at,
        "the leader hears of the renewal",
    )
    assert asyncio.run(follower.cancel(entry.claim_id, "revoked"))
    until(lambda: look(leader, entry.claim_id).state is ClaimState.ENDED, "the leader hears of the end")
    with pytest.raises(LeaseLost, match="revoked"):
        asyncio.run(leader.renew(lease_id, renewal))


def test_what_runs_told_one_replica_all_of_them_know(replicas: Replicas) -> None:
    leader, follower = replicas
    for name, broker in (("one", leader), ("two", follower)):
        release(broker, until_granted(broker, ask(broker, name)), work=6.0, work_s=2.0)

    def units(broker: Broker) -> list[tuple[int, float]]:
        return [(each.runs, round(each.units_per_s, 6)) for each in broker.history.measured()]

    for broker in replicas:
        until(lambda broker=broker: units(broker) == [(2, 3.0)], "both runs")  # type: ignore[misc]


def test_the_same_key_at_both_replicas_is_one_claim(replicas: Replicas) -> None:
    leader, follower = replicas
    assert ask(follower, "one") == ask(leader, "one") == ask(follower, "one")
    until(lambda: counts(leader.repository) == (0, 1, 1), "one lease")


def test_a_key_that_ended_before_the_leader_started_is_still_the_same_claim(
    replicas: Replicas, migrated_postgres_url: str
) -> None:
    leader, follower = replicas
    claim_id = ask(leader, "one")
    release(leader, until_granted(leader, claim_id))
    until(lambda: counts(leader.repository) == (0, 0, 0), "released")
    leader.stop()
    until_leading(follower)
    assert ask(follower, "one") == claim_id
    assert look(follower, claim_id).state is ClaimState.ENDED


def test_the_follower_takes_over_with_all_that_was_promised(replicas: Replicas) -> None:
    leader, follower = replicas
    held = until_granted(leader, ask(leader, "one", gpus=2))
    waiting = ask(leader, "two", gpus=2)
    # As if killed: it neither resigns nor writes again.
    leader.leadership.resign = lambda term: None  # type: ignore[method-assign]
    leader.leader.stop()
    began = time.monotonic()
    until_leading(follower)
    print(f"take-over after {time.monotonic() - began:.2f} s with a TTL of 1 s")
    release(follower, held)
    until_granted(follower, waiting)
    assert counts(follower.repository) == (0, 1, 2)


def test_a_leader_that_comes_back_from_a_pause_does_not_decide(replicas: Replicas) -> None:
    leader, follower = replicas
    term = leader.leader._lead.term
    assert term is not None
    # It believes that it still leads, and tells nobody.
    leader.leadership.acquire = lambda: term  # type: ignore[method-assign]
    leader.leadership.renew = lambda _: True  # type: ignore[method-assign]
    until_leading(follower)
    claim_id = ask(leader, "one")
    until_granted(follower, claim_id)
    assert counts(leader.repository) == (0, 1, 1)


def test_a_new_leader_that_never_heard_of_the_node_does_not_end_its_leases(replicas: Replicas) -> None:
    leader, follower = replicas
    claim_id = ask(leader, "new node")
    until_granted(leader, claim_id)
    nodes = follower.nodes.load()
    follower.mirror._known.clear()  # the agent talked to the leader only, which died before it stored that
    follower.nodes.glance = list  # type: ignore[method-assign]
    leader.stop()
    until_leading(follower)
    with pytest.raises(BrokerUnavailable, match="ask again"):
        asyncio.run(follower.collect(claim_id))
    follower.mirror.merge(nodes)
    assert asyncio.run(follower.collect(claim_id)).held is not None
