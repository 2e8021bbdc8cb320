"""Two replicas on one PostgreSQL: a move goes on where another replica left it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from airflow_gpu_provider.broker.resize import Wish
from airflow_gpu_provider.exceptions import BrokerUnavailable, LeaseLost, NotResized
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.resizes import ResizeAnswer
from airflow_gpu_provider.server import asks
from airflow_gpu_provider.server.auth import lease_secret
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.changes import AcceptMove, Change, CommitMove, DeclineMove, Resize
from airflow_gpu_provider.server.changes_api import answer_change
from airflow_gpu_provider.store.asks import AskStore
from tests.stored_rows import counts

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
        until(
            lambda: [holder.lease_id for holder in follower.holders()(new)] == [lease_id],
            "agents of the follower hear of both places",
        )
    kill(leader)
    waiting = ask(follower, "two", gpus=4)
    until_leading(follower)
    found = change(follower, Resize(lease_id, 1, Wish(memory_mib=LARGE)))
    assert found.offer is not None and found.offer.offer_id == offer.offer_id
    assert found.offer.phase == ("accepted" if is_accepted else "offered")
    change(follower, AcceptMove(lease_id, 1, offer.offer_id))
    moved = change(follower, CommitMove(lease_id, 1, offer.offer_id))
    assert ([device.id for device in moved.lease.devices], moved.offer) == ([new], None)
    assert counts(follower.repository) == (1, 1, 1)
    release(follower, entry)
    until_granted(follower, waiting)
    assert counts(follower.repository) == (0, 1, 4)


def test_an_offer_whose_leader_died_can_be_declined_under_the_next_one(replicas: Replicas) -> None:
    leader, follower = replicas
    entry, answer = offered(leader, follower)
    kill(leader)
    until_leading(follower)
    assert answer.offer is not None
    change(follower, DeclineMove(entry.held.lease_id, 1, answer.offer.offer_id))
    assert counts(follower.repository) == (0, 1, 1)
    ((held, _),) = follower.repository.live_leases()
    assert held.devices == entry.held.devices


def test_a_replica_that_does_not_lead_lets_the_leader_change_the_lease(replicas: Replicas) -> None:
    leader, follower = replicas
    entry, answer = offered(leader, follower)
    lease_id = entry.held.lease_id
    assert answer.offer is not None
    found = change(follower, Resize(lease_id, 1, Wish(memory_mib=LARGE)))
    assert found.offer is not None and found.offer.offer_id == answer.offer.offer_id
    accepted = change(follower, AcceptMove(lease_id, 1, answer.offer.offer_id))
    assert accepted.offer is not None and accepted.offer.phase == "accepted"
    moved = change(follower, CommitMove(lease_id, 1, answer.offer.offer_id))
    assert [device.id for device in moved.lease.devices] == [answer.offer.devices[0].id]
    assert moved == change(leader, CommitMove(lease_id, 1, answer.offer.offer_id))
    wider = change(follower, Resize(lease_id, 1, Wish(gpus=2, leave=())))
    assert len(wider.lease.devices) == 2
    back = change(follower, Resize(lease_id, 1, Wish(gpus=1, leave=(wider.lease.devices[0].id,))))  # type: ignore[arg-type]
    assert back.lease.devices == wider.lease.devices[1:]
    assert AskStore(follower.engine).unanswered(3600) == []


def test_what_the_leader_refuses_is_refused_by_every_replica(replicas: Replicas) -> None:
    leader, follower = replicas
    entry = until_granted(leader, ask(leader, "one"))
    lease_id = entry.held.lease_id
    with pytest.raises(NotResized, match="asked 9 members, has 1") as refused:
        change(follower, Resize(lease_id, 1, Wish(gpus=9)))
    assert refused.value.reason == "not_resized"
    with pytest.raises(LeaseLost, match="epoch 2 is over"):
        change(follower, Resize(lease_id, 2, Wish(gpus=2)))
    release(leader, entry)
    with pytest.raises(LeaseLost, match="released"):
        change(follower, Resize(lease_id, 1, Wish(gpus=2)))


def test_a_question_of_a_time_without_leader_is_answered_by_the_next_one(replicas: Replicas) -> None:
    leader, follower = replicas
    entry = until_granted(leader, ask(leader, "one"))
    kill(leader)
    assert not follower.desk.is_open
    answer = change(follower, Resize(entry.held.lease_id, 1, Wish(gpus=2)))
    assert len(answer.lease.devices) == 2


def test_a_question_that_nobody_answers_is_taken_back(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, follower = replicas
    entry = until_granted(leader, ask(leader, "one"))
    monkeypatch.setattr(asks, "PATIENCE_S", 0.5)
    leader.leader._asks.serve = lambda claim_ids=None: None  # type: ignore[method-assign]  # it hangs
    with pytest.raises(BrokerUnavailable, match="ask again, which is harmless"):
        change(follower, Resize(entry.held.lease_id, 1, Wish(gpus=2)))
    assert AskStore(follower.engine).unanswered(3600) == []


def test_a_lease_that_a_follower_released_while_it_was_to_grow_stays_ended(replicas: Replicas) -> None:
    leader, follower = replicas
    entry = until_granted(leader, ask(leader, "one"))
    leader.store.take_events = lambda term: []  # type: ignore[method-assign]  # the leader hears of nothing
    release(follower, entry)
    with pytest.raises(LeaseLost, match="has ended"):
        change(leader, Resize(entry.held.lease_id, 1, Wish(gpus=2)))
    assert counts(follower.repository) == (0, 0, 0)


def test_a_replica_that_does_not_lead_tells_what_others_want_back_too(replicas: Replicas) -> None:
    leader, follower = replicas
    entry = until_granted(leader, ask(leader, "one"))
    fit = Resize(entry.held.lease_id, 1, Wish(gpus=2, least=1))
    grown = change(follower, fit)
    assert (len(grown.lease.devices), grown.wanted_back) == (2, 0)
    ask(leader, "two")
    assert change(follower, fit).wanted_back == 1
