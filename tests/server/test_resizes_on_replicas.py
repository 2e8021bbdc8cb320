"""Two replicas on one PostgreSQL: a move goes on where another replica left it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from airflow_gpu_provider.broker.resize import Wish
from airflow_gpu_provider.exceptions import BrokerUnavailable, LeaseLost
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.resizes import ResizeAnswer
from airflow_gpu_provider.server.auth import lease_secret
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.changes import AcceptMove, Change, CommitMove, DeclineMove, Resize
from airflow_gpu_provider.server.changes_api import answer_change

from .conftest import SECRET, ask, report, until_leading
from .test_replicas import Replicas, release, replicas, until, until_granted

__all__ = ["replicas"]

LARGE = 81_920


def change(broker: Broker, request: Change) -> ResizeAnswer:
    secret = lease_secret(SECRET, request.lease_id, request.epoch)
    return asyncio.run(answer_change(broker, request, secret))


def offered(leader: Broker, follower: Broker) -> tuple[Any, ResizeAnswer]:
    """Return a lease of a small device, and its offer of a large one."""
    entry = until_granted(leader, ask(leader, "one"))
    follower.report(ReportBody(nodes=(report("n2", memory_mib=LARGE),)))
    until(lambda: len(leader.mirror.stored()) == 2, "the leader hears of the large devices")
    wish = Resize(entry.held.lease_id, 1, Wish(memory_mib=LARGE))
    answer = change(leader, wish)
    assert answer.offer is not None
    assert change(leader, wish).offer.offer_id == answer.offer.offer_id  # type: ignore[union-attr]
    return entry, answer


def kill(broker: Broker) -> None:
    """As if killed: it neither resigns nor writes again."""
    broker.leadership.resign = lambda term: None  # type: ignore[method-assign]
    broker.leader.stop()


@pytest.mark.parametrize("is_accepted", [False, True])
def test_the_next_leader_finds_the_offer_and_the_move_goes_on(replicas: Replicas, is_accepted: bool) -> None:
    leader, follower = replicas
    entry, answer = offered(leader, follower)
    lease_id, offer = entry.held.lease_id, answer.offer
    assert offer is not None
    new = offer.devices[0].id
    if is_accepted:
        change(leader, AcceptMove(lease_id, 1, offer.offer_id))
        until(lambda: follower.holders()(new) == (lease_id,), "agents of the follower hear of both places")
    kill(leader)
    waiting = ask(follower, "two", gpus=4)
    until_leading(follower)
    found = change(follower, Resize(lease_id, 1, Wish(memory_mib=LARGE)))
    assert found.offer is not None and found.offer.offer_id == offer.offer_id
    assert found.offer.phase == ("accepted" if is_accepted else "offered")
    change(follower, AcceptMove(lease_id, 1, offer.offer_id))
    moved = change(follower, CommitMove(lease_id, 1, offer.offer_id))
    assert ([device.id for device in moved.lease.devices], moved.offer) == ([new], None)
    assert follower.repository.counts() == (1, 1, 1)
    release(follower, entry)
    until_granted(follower, waiting)
    assert follower.repository.counts() == (0, 1, 4)


def test_an_offer_whose_leader_died_can_be_declined_under_the_next_one(replicas: Replicas) -> None:
    leader, follower = replicas
    entry, answer = offered(leader, follower)
    kill(leader)
    until_leading(follower)
    assert answer.offer is not None
    change(follower, DeclineMove(entry.held.lease_id, 1, answer.offer.offer_id))
    assert follower.repository.counts() == (0, 1, 1)
    ((held, _),) = follower.repository.live_leases()
    assert held.devices == entry.held.devices


def test_a_replica_that_does_not_lead_says_that_another_try_may_help(replicas: Replicas) -> None:
    leader, follower = replicas
    entry = until_granted(leader, ask(leader, "one"))
    with pytest.raises(BrokerUnavailable, match=r"Only the replica that leads .* ask again") as refused:
        change(follower, Resize(entry.held.lease_id, 1, Wish(gpus=2)))
    assert refused.value.reason == "not_leading"
    assert len(change(leader, Resize(entry.held.lease_id, 1, Wish(gpus=2))).lease.devices) == 2


def test_a_lease_that_a_follower_released_while_it_was_to_grow_stays_ended(replicas: Replicas) -> None:
    leader, follower = replicas
    entry = until_granted(leader, ask(leader, "one"))
    leader.store.take_events = lambda term: []  # type: ignore[method-assign]  # the leader hears of nothing
    release(follower, entry)
    with pytest.raises(LeaseLost, match="has ended"):
        change(leader, Resize(entry.held.lease_id, 1, Wish(gpus=2)))
    assert follower.repository.counts() == (0, 0, 0)
