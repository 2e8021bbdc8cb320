"""What another replica asked of the leader is done while its caller waits, and never later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta

import pytest

from airflow_gpu_provider.broker.resize import Wish
from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.exceptions import BrokerUnavailable
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.board import Entry
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.changes import Resize
from airflow_gpu_provider.server.clock import utc_now
from airflow_gpu_provider.server.requests import Collect, Request, Submit
from airflow_gpu_provider.store.asks import AskStore
from airflow_gpu_provider.wire import ClaimBody, RequestBody, TaskKey

from .conftest import ask, look, report


class ByHand:
    """A leader whose turns happen when the test says so."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        broker.report(ReportBody(nodes=(report(),)))
        broker.leader._step()

    def hear(self) -> None:
        """Take note of what other replicas wrote."""
        assert self.broker.leader._lead.term is not None
        self.broker.leader._take_events(self.broker.leader._lead.term)

    def turn(self) -> None:
        """Serve what was asked."""
        assert self.broker.leader._lead.term is not None
        for _ in range(2):  # a resize waits until the one before has settled
            self.broker.desk.turn(self.broker.leader._lead.term)

    def do(self, request: Request) -> Entry:
        """Serve a request at once."""
        answer = self.broker.desk.ask(request)
        self.turn()
        return answer.result(0)

    def lease(self, gpus: int) -> str:
        """Return a live lease of so many devices."""
        key = TaskKey(dag_id="d", run_id="r", task_id="t")
        entry = self.do(Submit(ClaimBody(key=key, request=RequestBody(gpus=gpus))))
        assert entry.held is not None
        self.do(Collect(entry.claim_id))
        return entry.held.lease_id

    def devices(self, lease_id: str) -> int:
        """Return how many devices a lease has."""
        held = self.broker.desk.board.by_lease[lease_id].held
        return 0 if held is None else len(held.devices)


@pytest.fixture
def leader(settings: Settings) -> Iterator[ByHand]:
    broker = Broker(settings)
    yield ByHand(broker)
    broker.stop()


def to_one(lease_id: str) -> Resize:
    return Resize(lease_id, 1, Wish(gpus=1, leave=()))


def put(store: AskStore, request: Resize) -> int:
    return store.put(request.lease_id, 1, "Resize", asdict(request)).id


@pytest.mark.parametrize("is_taken_back", [False, True])
def test_a_question_that_was_taken_back_changes_nothing(leader: ByHand, is_taken_back: bool) -> None:
    store, lease_id = AskStore(leader.broker.engine), leader.lease(2)
    number = put(store, to_one(lease_id))
    leader.hear()
    if is_taken_back:
        store.take_back(number)
    leader.turn()
    assert leader.devices(lease_id) == (2 if is_taken_back else 1)


def test_a_request_whose_time_is_over_is_refused_and_changes_nothing(leader: ByHand) -> None:
    lease_id = leader.lease(2)
    answer = leader.broker.desk.ask(to_one(lease_id), until=time.monotonic())
    leader.turn()
    with pytest.raises(BrokerUnavailable, match="too long ago"):
        answer.result(0)
    assert leader.devices(lease_id) == 2


def test_an_answer_never_reaches_the_question_that_came_next(leader: ByHand) -> None:
    store, lease_id = AskStore(leader.broker.engine), leader.lease(2)
    first = put(store, to_one(lease_id))
    leader.hear()
    store.take_back(first)
    second = put(store, to_one(lease_id))
    leader.turn()
    assert store.look(second) is None
    leader.hear()
    leader.turn()
    deadline = time.monotonic() + 20
    while (answer := store.look(second)) is None and time.monotonic() < deadline:
        time.sleep(0.02)  # another thread writes it
    assert answer == {"error": None}


def test_a_replica_whose_clock_is_late_is_answered(broker: Broker, settings: Settings) -> None:
    claim_id = ask(broker, "one", gpus=2)
    held = look(broker, claim_id, "granted").held
    assert held is not None
    late = Broker(settings, clock=lambda: utc_now() - timedelta(seconds=60))
    assert asyncio.run(late.asks.ask(to_one(held.lease_id))) == (claim_id, 0)
    late.stop()
