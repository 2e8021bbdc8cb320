"""The broker of one replica: its tables, its view of the fleet, its desk and its part in the election.

A request goes to the desk when this replica leads (many share one commit), else into the tables, where the
leader finds it. The routes are thin: what they do is a method here. The next step is `leader`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TypeVar

from starlette.concurrency import run_in_threadpool

from airflow_gpu_provider.broker.model import Fleet
from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.exceptions import BrokerUnavailable, InvalidRequest, LeaseLost
from airflow_gpu_provider.reports import LeasedDevice, ReportAnswer, ReportBody
from airflow_gpu_provider.server.asks import Asks
from airflow_gpu_provider.server.auth import check_lease_secret
from airflow_gpu_provider.server.board import Entry, taken_for, task_of
from airflow_gpu_provider.server.clock import BrokerClock
from airflow_gpu_provider.server.desk import Desk
from airflow_gpu_provider.server.draft import Asked, NotLeading
from airflow_gpu_provider.server.drains import Drains
from airflow_gpu_provider.server.figures import Figures
from airflow_gpu_provider.server.fleet import FleetMirror
from airflow_gpu_provider.server.history import History
from airflow_gpu_provider.server.holders import HoldersOf, held_of, holders_of
from airflow_gpu_provider.server.leader import Leader
from airflow_gpu_provider.server.other_reports import take_in
from airflow_gpu_provider.server.outbox import Outbox
from airflow_gpu_provider.server.preempting import renewal
from airflow_gpu_provider.server.probing import Probing
from airflow_gpu_provider.server.reconciler import TaskStates
from airflow_gpu_provider.server.requests import Cancel, Collect, Release, Renew, Request, Submit
from airflow_gpu_provider.server.reservations import Reservations
from airflow_gpu_provider.server.stored import StoredEntries
from airflow_gpu_provider.server.upkeep import Upkeep
from airflow_gpu_provider.server.wakeup import Wakeup
from airflow_gpu_provider.server.watches import Watches
from airflow_gpu_provider.store.drains import DrainStore
from airflow_gpu_provider.store.engine import make_engine
from airflow_gpu_provider.store.history import RunStore
from airflow_gpu_provider.store.leadership import Leadership, ttl_on
from airflow_gpu_provider.store.nodes import NodeStore
from airflow_gpu_provider.store.repository import Repository
from airflow_gpu_provider.store.reservations import ReservationStore
from airflow_gpu_provider.store.sole import SoleProcess
from airflow_gpu_provider.store.turns import TurnStore
from airflow_gpu_provider.wire import ClaimBody, ReleaseBody, RenewAnswer, RenewBody

T = TypeVar("T")

_ASK_THE_TABLES = frozenset({NotLeading.default_reason, "unknown_claim", "unknown_lease"})


class Broker:
    """One replica."""

    def __init__(
        self,
        settings: Settings,
        *,
        task_states: TaskStates | None = None,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self.settings = settings
        self.signing_key = settings.signing_key()
        self.engine = make_engine(settings.database_url())
        self.clock = clock = clock or BrokerClock(follows=self.engine.dialect.name == "postgresql")
        self._sole = SoleProcess(self.engine)
        self.repository = Repository(self.engine)
        self.stored = StoredEntries(self.repository)
        self.store = TurnStore(self.engine)
        self.watches = Watches()
        self.wakeup = Wakeup()
        self.mirror = FleetMirror(
            stale_after_s=settings.stale_after_s,
            forget_after_s=settings.forget_nodes_after_s,
            max_load=settings.max_load,
            flavors=settings.own_flavors(),
        )
        self.probing = Probing(self.mirror, self.signing_key)
        me = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(3).hex()}"
        self.leadership = Leadership(self.engine, me, ttl_on(self.engine, settings.leader_ttl_s))
        self.nodes = NodeStore(self.engine, me)
        self.drains = Drains(DrainStore(self.engine), self.mirror, clock, self.wakeup.ring_leader)
        self.reservations = Reservations(
            ReservationStore(self.engine),
            self.fleet,
            lambda: [entry.lease() for entry in self.entries() if entry.held is not None],
            notice=settings.cycle_policy().reservation_notice,
            clock=clock,
            wake=self.wakeup.ring_leader,
        )
        self._cached_outbox: Outbox | None = None
        self.runs = RunStore(self.engine)
        self.history = History(self.runs, settings, clock)
        self.desk = Desk(
            settings,
            self.store,
            clock=clock,
            wake=self.wakeup.ring_leader,
            decided=self.watches.ring,
            device_of=self.mirror.device,
        )
        self.asks = Asks(self.engine, self.desk)
        self.leader = Leader(
            settings=settings,
            leadership=self.leadership,
            desk=self.desk,
            asks=self.asks,
            store=self.store,
            repository=self.repository,
            stored=self.stored,
            nodes=self.nodes,
            mirror=self.mirror,
            drains=self.drains,
            reservations=self.reservations,
            history=self.history,
            wakeup=self.wakeup,
            clock=clock,
        )
        if isinstance(clock, BrokerClock):
            self.leadership.hear, clock.on_step = clock.hear, self.leader.load_again
        self.figures = Figures(self)
        self.upkeep = Upkeep(self, task_states)

    def start(self) -> None:
        """Load the fleet and start the leader's loop. Raise BrokerUnavailable for a second one on SQLite."""
        self._sole.take()
        try:
            self.leadership.hear_time()
            take_in(self.mirror, self.nodes)
            self.drains.refresh()
            self.reservations.refresh()
            self.history.start()
        except BaseException:  # who tries again takes the mark and the connections anew
            self.engine.dispose()
            self._sole.give_up()
            raise
        self.leader.start()
        self.upkeep.start()

    def stop(self) -> None:
        """Stop the loop, resign and close the database."""
        self.upkeep.stop()
        self.leader.stop()
        self.asks.close()
        self.store.close()
        self.engine.dispose()
        self._sole.give_up()

    # -- claims
    async def submit(self, body: ClaimBody, *, is_attended: bool) -> Entry:
        """Store a claim and return it; `is_attended` when its asker waits for the grant on this request."""
        request = Submit(body.of_at_least(self.settings.least_milli), is_attended=is_attended)
        if body.key.try_number > 1:
            request = await run_in_threadpool(self._retry, request)
        return await self._ask(request, lambda: self._submit_to_tables(request))

    async def find(self, claim_id: str) -> Entry:
        """Return where a claim stands. Raise InvalidRequest for an unknown one."""
        if self.desk.is_open and (entry := self.desk.board.find(claim_id)) is not None:
            return entry
        return await run_in_threadpool(self.stored.one, claim_id)

    async def collect(self, claim_id: str) -> Entry:
        """Return a claim; the TTL of its lease starts when it is granted and not yet collected."""
        entry = self._collected(claim_id)
        if entry is None:
            entry = await self._ask(Collect(claim_id), lambda: self._collect_from_tables(claim_id))
        if self._lacks_device(entry):
            # The node may be so new that this replica, or the leader that has just begun, never heard of it.
            await run_in_threadpool(take_in, self.mirror, self.nodes)
        if not self._lacks_device(entry):
            return entry
        if not self.desk.is_open or self._is_new(entry):
            raise BrokerUnavailable("This replica does not know the leased devices yet; ask again.")
        # The agent stopped reporting a leased device: nobody can work on it.
        await self.cancel(claim_id, "device_gone")
        return await self.find(claim_id)

    def _collected(self, claim_id: str) -> Entry | None:
        """Return a claim whose lease is collected already: there is nothing to wait a turn for."""
        entry = self.desk.board.entries.get(claim_id) if self.desk.is_open else None
        return entry if entry is not None and entry.held is not None and entry.held.collected else None

    def _lacks_device(self, entry: Entry) -> bool:
        held = entry.held
        return held is not None and any(self.mirror.device(d) is None for d in (*held.devices, *held.spares))

    def _is_new(self, entry: Entry) -> bool:
        since = entry.held.granted_at if entry.held else entry.submitted_at
        return (self.clock() - since).total_seconds() < self.settings.stale_after_s

    async def cancel(self, claim_id: str, reason: str = "cancelled") -> bool:
        """Withdraw a claim or end what it holds; return False when it was over already."""
        before = self.desk.board.entries.get(claim_id)
        found = await self._ask(
            Cancel(claim_id, reason),
            lambda: self.repository.cancel(claim_id, now=self.clock(), reason=reason),
        )
        return before is not None if isinstance(found, Entry) else found

    # -- leases
    async def renew(self, lease_id: str, body: RenewBody) -> RenewAnswer:
        """Keep a lease; return until when. Raise IdentityRefused or LeaseLost."""
        check_lease_secret(self.signing_key, lease_id, body.epoch, body.secret)
        now, ttl_s = self.clock(), self.settings.lease_ttl_s
        saved_at = None if body.saved_s is None else now - timedelta(seconds=body.saved_s)

        def renew_in_tables() -> RenewAnswer:
            row = self.repository.renew(lease_id, body.epoch, now=now, ttl_s=ttl_s, saved_at=saved_at)
            return renewal(row.expires_at, taken_for(row), now)

        found = await self._ask(Renew(lease_id, body.epoch, saved_at), renew_in_tables)
        if isinstance(found, RenewAnswer):
            return found
        if found.held is None:  # a lease that ended in the same moment: the tables know why
            return await run_in_threadpool(renew_in_tables)
        return renewal(found.held.expires_at, found.held.taken_back, now)

    async def release(self, lease_id: str, body: ReleaseBody) -> bool:
        """Give a lease back; return False when it had ended. Raise IdentityRefused or LeaseLost."""
        check_lease_secret(self.signing_key, lease_id, body.epoch, body.secret)
        told = body if body.tells_history else None
        found = await self._ask(
            Release(lease_id, body.epoch, body.outcome, body.failed_devices, told),
            lambda: self.repository.release(lease_id, body, now=self.clock(), device_of=self.mirror.device),
        )
        return True if isinstance(found, Entry) else found

    # -- agents
    def report(self, body: ReportBody) -> ReportAnswer:
        """Fold an agent's report; answer which of its devices are leased, and whom it measures."""
        if self.mirror.fold(body.nodes, now := self.clock()):
            self.wakeup.ring_leader()
        held = held_of(body, self.holders())
        told = self.probing.news(body, (holder.nodes for _, holder in held), now)
        return ReportAnswer(
            leased=[LeasedDevice(id=device, lease_id=holder.lease_id) for device, holder in held],
            report_interval_s=self.settings.report_interval_s,
            peers=told.peers,
            peer_plan=told.peer_plan,
            echo_key=told.echo_key,
        )

    def holders(self) -> HoldersOf:
        """Return a function from device to the live leases that hold it or share it."""
        return holders_of(self.desk, self.repository)

    def entries(self) -> list[Entry]:
        """Return the claims that wait or hold devices, as this replica knows them."""
        if self.desk.is_open:
            return list(self.desk.board.entries.values())
        return self.stored.waiting_or_held()

    def fleet(self, now: datetime) -> Fleet:
        """Return the fleet as reported, with what people drained."""
        return self.drains.apply(self.mirror.fleet(now), now)

    # -- through the tables
    async def _ask(self, request: Request, otherwise: Callable[[], T]) -> Entry | T:
        """Serve a request at the desk, or through the tables when the desk is closed or does not know."""
        try:
            answer = self._outbox().expect()
            self.desk.put(Asked(request, answer))
            return await answer.future
        except (NotLeading, InvalidRequest, LeaseLost) as error:
            # What is not on the board may be over: the tables also know how it ended. Any other refusal
            # stands, or a request that cannot be judged would be stored and asked again and again.
            if error.reason not in _ASK_THE_TABLES:
                raise
            return await run_in_threadpool(otherwise)

    def _outbox(self) -> Outbox:
        loop = asyncio.get_running_loop()
        if self._cached_outbox is None or self._cached_outbox.loop is not loop:
            self._cached_outbox = Outbox(loop)
        return self._cached_outbox

    def _retry(self, request: Submit) -> Submit:
        """Complete the request of a later try: what failed before, and what may be taken over."""
        task, now = task_of(request.body.key), self.clock()
        failed = self.store.failed_devices([task], self.mirror.suspects()).get(task, set())
        usable = {
            d.id for n in self.fleet(now).nodes if not n.unavailable for d in n.devices if not d.unavailable
        }
        usable -= self.reservations.closed_to(Entry("", request.body, now).claim())
        return Submit(request.body, frozenset(usable), frozenset(failed), request.is_attended)

    def _submit_to_tables(self, request: Submit) -> Entry:
        given = {"usable": request.usable, "suspects": self.mirror.suspects()}
        return self.stored.one(self.repository.submit(request.body, now=self.clock(), **given))

    def _collect_from_tables(self, claim_id: str) -> Entry:
        self.repository.lease_of(claim_id, now=self.clock(), ttl_s=self.settings.lease_ttl_s)
        return self.stored.one(claim_id)
