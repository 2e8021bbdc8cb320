"""The leader's loop: elected, it serves the desk turn after turn from what it keeps in memory.

Every replica runs this thread; only the elected one decides. It wakes when something is asked or reported
and looks by itself every `_LOOK_S`, which bounds what a missed wake-up costs. What other replicas wrote
reaches it as events in the tables. Whenever the tables are not what it thought, it loads them again; the
loop itself never ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime

from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.keeping import Keeping
from airflow_gpu_provider.broker.model import Fleet
from airflow_gpu_provider.broker.throughput import Speeds
from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.server.asks import Asks
from airflow_gpu_provider.server.board import Board, Entry
from airflow_gpu_provider.server.desk import Desk
from airflow_gpu_provider.server.drains import Drains
from airflow_gpu_provider.server.fleet import FleetMirror
from airflow_gpu_provider.server.history import History
from airflow_gpu_provider.server.lead import Lead
from airflow_gpu_provider.server.other_reports import take_in
from airflow_gpu_provider.server.preempting import kept_leases
from airflow_gpu_provider.server.requests import sync
from airflow_gpu_provider.server.reservations import Reservations
from airflow_gpu_provider.server.standings import Standings
from airflow_gpu_provider.server.stored import StoredEntries
from airflow_gpu_provider.server.wakeup import Wakeup
from airflow_gpu_provider.store.leadership import Leadership, StaleTerm, Term
from airflow_gpu_provider.store.nodes import NodeStore
from airflow_gpu_provider.store.repository import Repository
from airflow_gpu_provider.store.turns import Overtaken, TurnStore

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_STANDINGS_S = 1.0
_MIX = 1000  # requests that the cost of fragmentation is computed over


class Leader(threading.Thread):
    """The thread that decides while this replica leads."""

    def __init__(
        self,
        *,
        settings: Settings,
        leadership: Leadership,
        desk: Desk,
        asks: Asks,
        store: TurnStore,
        repository: Repository,
        stored: StoredEntries,
        nodes: NodeStore,
        mirror: FleetMirror,
        drains: Drains,
        reservations: Reservations,
        history: History,
        wakeup: Wakeup,
        clock: Callable[[], datetime],
    ) -> None:
        super().__init__(name="gpu-broker-leader", daemon=True)
        self._settings = settings
        self._lead = Lead(leadership)
        self._desk = desk
        self._asks = asks
        self._store = store
        self._repository = repository
        self._stored = stored
        self._nodes = nodes
        self._mirror = mirror
        self._drains = drains
        self._reservations = reservations
        self._history = history
        self._wakeup = wakeup
        self._clock = clock
        self._standings = Standings(store)
        self._stopping = threading.Event()
        self._must_load = False
        self._fleet_version = (-1, -1)
        self._history_version = self._reservations_version = -1
        self._next_events = self._next_standings = 0.0

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the loop and resign."""
        self._stopping.set()
        self._wakeup.ring_leader()
        if self.is_alive():
            self.join(timeout_s)

    def load_again(self) -> None:
        """Take everything from the tables before the next turn."""
        self._must_load = True

    def run(self) -> None:
        """Loop until `stop`. Whatever a step raises, the next one starts from the tables."""
        try:
            while not self._stopping.is_set():
                try:
                    self._step()
                except (Overtaken, IntegrityError) as error:
                    log.info("Loading the tables again: %s", error)
                    self._must_load = True
                except StaleTerm as error:
                    log.warning("No longer leading: %s", error)
                    self._follow()
                except SQLAlchemyError:
                    log.exception("The broker's database failed; trying again")
                    self._follow()
                    self._stopping.wait(0.5)
                except Exception:
                    log.exception("A turn failed; the next one starts from the tables")
                    self._must_load = True
                    self._stopping.wait(0.05)
        finally:
            self._desk.close()
            self._lead.close()

    def _step(self) -> None:
        self._wakeup.wait_for_work(self._lead.wait_s(_LOOK_S))
        if self._lead.keep():
            self._desk.close()
        term = self._lead.term
        if term is not None:
            if self._must_load or not self._desk.is_open:
                self._load(term)
            if time.monotonic() >= self._next_events:
                self._next_events = time.monotonic() + _LOOK_S
                self._take_events(term)
            self._see_fleet()
            self._desk.crowd.gather(self._wakeup.wait_for_work)
            if self._desk.turn(term):
                self._wakeup.ring_leader()  # what was postponed, or can start now
            if time.monotonic() >= self._next_standings:
                self._next_standings = time.monotonic() + _STANDINGS_S
                self._note_standings()
            if self._standings.tell():
                self._wakeup.ring_leader()

    # -- leading
    def _follow(self) -> None:
        self._desk.close()
        self._lead.give_up()

    def _load(self, term: Term) -> None:
        """Take the board and the engine from the tables."""
        self._must_load = False  # first: another thread may set it meanwhile
        self._store.take_events(term)  # what they tell is in the tables by now
        now = self._clock()
        take_in(self._mirror, self._nodes)
        board = Board(decided=self._desk.board.decided, decided_keys=self._desk.board.decided_keys)
        for entry in self._stored.waiting_or_held():
            board.add(entry)
        for entry in self._known_again(board):
            board.remember(entry)
        fleet = self._fleet(now)
        entries, policy = list(board.entries.values()), self._settings.preemption_policy()
        engine = Engine(
            self._settings.cycle_policy(),
            fleet,
            [entry.lease() for entry in entries if entry.held is not None],
            [entry.claim(admitted=True) for entry in entries if entry.held is None],
            self._store.recent_requests(_MIX),
            self._learned(),
            quotas=self._settings.team_quotas(),
            offers=[e.held.offer.offer for e in entries if e.held is not None and e.held.offer is not None],
            keeping=self._keeping(),
            preemption=policy,
            taken_back=kept_leases(self._repository, entries, policy.grace, now),
        )
        self._desk.node_of = {device.id: node.name for node in fleet.nodes for device in node.devices}
        self._standings.forget()
        self._desk.open(board, engine)
        self._asks.serve()
        self._wakeup.ring_leader()

    def _learned(self) -> dict[str, Speeds]:
        self._history_version = self._history.version
        return self._history.speeds()

    def _keeping(self) -> Keeping:
        """Return what is reserved; the devices that the last leader kept are kept on."""
        self._reservations.refresh()
        self._reservations_version = self._reservations.version
        notice = self._settings.cycle_policy().reservation_notice
        return Keeping(notice, self._reservations.not_over(), self._reservations.chosen())

    def _known_again(self, board: Board) -> Iterator[Entry]:
        """Yield the decided claims that queued requests ask for once more."""
        ids = self._store.ids_of(self._desk.submitted_keys())
        missing = [claim_id for claim_id in ids.values() if claim_id not in board.entries]
        yield from self._stored.of(missing)

    def _take_events(self, term: Term) -> None:
        """Learn what other replicas wrote into the tables."""
        changed = self._store.take_events(term)
        if not changed:
            return
        for entry in self._stored.of(changed):
            sync(self._desk, entry)
        self._asks.serve(changed)

    def _see_fleet(self) -> None:
        if self._reservations.version != self._reservations_version and self._desk.engine is not None:
            self._reservations_version = self._reservations.version
            self._desk.engine.reserve(self._reservations.not_over())
        if (self._mirror.version, self._drains.version) == self._fleet_version or self._desk.engine is None:
            return
        now = self._clock()
        fleet = self._fleet(now)
        self._desk.engine.set_fleet(fleet, now)
        self._desk.node_of = {device.id: node.name for node in fleet.nodes for device in node.devices}

    def _fleet(self, now: datetime) -> Fleet:
        """Return the fleet as reported, with what people drained."""
        self._fleet_version = (self._mirror.version, self._drains.version)
        return self._drains.apply(self._mirror.fleet(now), now)

    # -- once a second
    def _note_standings(self) -> None:
        """Tell the engine what was learned, and everybody where the next claims stand."""
        if self._desk.engine is not None and self._history.version != self._history_version:
            self._desk.engine.learn(self._learned())
        # The upkeep does so too, but it waits for databases: what grants must see for itself who fell silent.
        self._mirror.age(self._clock())
        if self._desk.engine is not None:
            self._standings.work_out(self._desk.engine, self._desk.board, self._clock())
