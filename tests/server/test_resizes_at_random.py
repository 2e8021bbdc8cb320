"""Random claims and changes of leases: after each one the tables, the board and the engine say the same."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from airflow_gpu_provider.broker.resize import Wish
from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.exceptions import LeaseLost, NotResized
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.board import Entry, entry_of
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.changes import AcceptMove, CommitMove, DeclineMove, Resize
from airflow_gpu_provider.wire import ClaimBody, RequestBody, TaskKey

from .conftest import report, until_leading
from .test_resizes_over_http import Clock

SIZES = {"n1": 16_384, "n2": 40_960, "n3": 81_920}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker(settings: Settings, clock: Clock) -> Iterator[Broker]:
    """Yield a broker with two small devices."""
    longer = {"lease_ttl_s": 1e6, "collect_within_s": 1e6, "stale_after_s": 1e6, "forget_nodes_after_s": 2e6}
    broker = Broker(settings.model_copy(update=longer), clock=clock)
    broker.start()
    broker.report(ReportBody(nodes=(report("n1", memory_mib=SIZES["n1"]),)))
    until_leading(broker)
    yield broker
    broker.stop()


class Player:
    """Makes one random call after another, as a holder that lost its answers now and then would."""

    def __init__(self, broker: Broker, clock: Clock, seed: int) -> None:
        self.broker, self.clock = broker, clock
        self.random = random.Random(seed)
        self.tasks = 0
        self.done: Counter[str] = Counter()
        #: what was offered to each lease
        self.offers: dict[str, str] = {}

    def step(self) -> None:
        """Do one thing."""
        held = [entry for entry in self.broker.desk.board.entries.values() if entry.held is not None]
        moving = [entry for entry in held if entry.held is not None and entry.held.offer is not None]
        if self.random.random() < 0.1:
            self.clock.ahead += timedelta(seconds=self.random.choice([5, 61, 601]))
        chance = self.random.random()
        if chance < 0.2 or not held:
            self.submit()
        elif chance < 0.4 and moving:
            self.answer(self.random.choice(moving))
        elif chance < 0.5:
            self.end(self.random.choice(held))
        else:
            self.resize(self.random.choice(held))

    def submit(self) -> None:
        self.tasks += 1
        key = TaskKey(dag_id="d", run_id="r", task_id=f"t{self.tasks}")
        gpus, milli = self.random.choice([(1, 1000), (1, 1000), (2, 1000), (1, 250), (1, 500)])
        request = RequestBody(gpus=gpus, milli=milli, memory_mib=16 * milli, models=("A100",))
        body = ClaimBody(key=key, request=request)
        entry = asyncio.run(self.broker.submit(body, is_attended=True))
        self.done[f"submitted, {entry.state.value}"] += 1

    def resize(self, entry: Entry) -> None:
        now = entry.request
        memory = Wish(memory_mib=self.random.choice([2048, 16_384, 30_000, 60_000]))
        gpus = max(1, now.gpus + self.random.choice([-1, 1, 1]))
        self._change(entry, Resize, self.random.choice([memory, memory, Wish(gpus=gpus)]))

    def answer(self, entry: Entry) -> None:
        assert entry.held is not None
        offer_id = self.offers.get(entry.held.lease_id)
        for kind in self.random.choice(
            [(AcceptMove, CommitMove), (AcceptMove,), (CommitMove,), (DeclineMove,)]
        ):
            if offer_id is not None and entry.held is not None:
                self._change(entry, kind, offer_id)

    def end(self, entry: Entry) -> None:
        asyncio.run(self.broker.cancel(entry.claim_id))
        self.done["ended"] += 1

    def _change(self, entry: Entry, kind: Any, what: object) -> None:
        assert entry.held is not None
        lease_id = entry.held.lease_id
        for _ in range(self.random.choice([1, 1, 1, 2])):  # told again
            try:
                found = self.broker.desk.ask(kind(lease_id, entry.held.epoch, what)).result(20)
            except (NotResized, LeaseLost) as refused:
                self.done[f"{kind.__name__} {refused.reason}"] += 1
                return
            self.done[kind.__name__] += 1
            if found.held is not None and found.held.offer is not None:
                self.offers[lease_id] = found.held.offer.id


def shown(entry: Entry) -> tuple[object, ...]:
    held = entry.held
    assert held is not None
    offer = held.offer and (held.offer.id, held.offer.offer)
    what = held.lease_id, held.epoch, held.parts, held.devices, held.nodes, held.match_degree
    return what, entry.request, offer, held.moved_by, held.expires_at, held.collected


def check(broker: Broker) -> None:
    """Compare the tables with the board and the engine while nothing is asked."""
    stored = {str(row.id): entry_of(row, held) for held, row in broker.repository.live_leases()}
    board = {key: each for key, each in broker.desk.board.entries.items() if each.held is not None}
    assert {key: shown(each) for key, each in stored.items()} == {
        key: shown(each) for key, each in board.items()
    }
    engine = broker.desk.engine
    assert engine is not None
    engine.validate()
    leases = {lease.id: lease for lease in engine.floor.holdings}
    assert {key: (each.devices, each.milli, each.request) for key, each in leases.items()} == {
        each.id: (each.devices, each.milli, each.request) for each in (e.lease() for e in stored.values())
    }
    offers = {o.offer.lease_id: o.offer for e in stored.values() if e.held and (o := e.held.offer)}
    assert {offer.lease_id: offer for offer in engine.floor.holdings.offers()} == offers
    taken: Counter[str] = Counter()
    for each in stored.values():
        assert each.held is not None and len(each.held.devices) == each.request.gpus
        taken.update(each.held.taken())
    assert all(milli <= 1000 for milli in taken.values()), taken


@pytest.mark.parametrize("seed", range(5))
def test_the_tables_the_board_and_the_engine_agree_whatever_holders_ask(
    broker: Broker, clock: Clock, seed: int
) -> None:
    player = Player(broker, clock, seed)
    for _ in range(2):
        player.submit()
    # Larger devices join when the small ones are leased: so there is somewhere to move to.
    broker.report(ReportBody(nodes=tuple(report(n, memory_mib=SIZES[n]) for n in ("n2", "n3"))))
    for _ in range(60):
        player.step()
        # What was told is written, and the leader's turn that follows may grant or lapse: look between turns.
        while not broker.desk.engine.is_settled:  # type: ignore[union-attr]
            broker.wakeup.ring_leader()
        _between_turns(broker)
    assert player.done["Resize"] > 5, player.done
    print(dict(sorted(player.done.items())))


def _between_turns(broker: Broker) -> None:
    """Check until a check falls between two turns: a turn changes the three one after another."""
    for attempt in range(50):
        try:
            return check(broker)
        except AssertionError:
            if attempt == 49:
                raise
            asyncio.run(asyncio.sleep(0.02))
