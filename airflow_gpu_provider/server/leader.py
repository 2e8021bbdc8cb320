"""The leader's loop: elected, it reads a snapshot, decides, and writes the decisions in one transaction.

Every replica runs this thread; only the elected one decides. It wakes when something changed (submit,
release, report) and looks by itself at least every `_LOOK_S`, which bounds what a missed wake-up costs. An
error in a cycle is logged and the next cycle starts from the tables again: the loop itself never ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from airflow_gpu_provider.broker.cycle import decide
from airflow_gpu_provider.broker.model import DeviceId, Snapshot
from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.server.fleet import FleetMirror
from airflow_gpu_provider.server.reconciler import TaskStates, reconcile
from airflow_gpu_provider.server.wakeup import Wakeup
from airflow_gpu_provider.store.decisions import DecisionStore
from airflow_gpu_provider.store.leadership import Leadership, StaleTerm, Term
from airflow_gpu_provider.store.nodes import NodeStore
from airflow_gpu_provider.store.repository import Repository

log = logging.getLogger(__name__)

_LOOK_S = 0.25
_UPKEEP_S = 1.0  # reports to the database, leases against task states


class Leader(threading.Thread):
    """The thread that decides while this replica leads."""

    def __init__(
        self,
        *,
        settings: Settings,
        leadership: Leadership,
        decisions: DecisionStore,
        repository: Repository,
        nodes: NodeStore,
        mirror: FleetMirror,
        wakeup: Wakeup,
        clock: Callable[[], datetime],
        task_states: TaskStates | None,
    ) -> None:
        super().__init__(name="gpu-broker-leader", daemon=True)
        self._settings = settings
        self._leadership = leadership
        self._decisions = decisions
        self._repository = repository
        self._nodes = nodes
        self._mirror = mirror
        self._wakeup = wakeup
        self._clock = clock
        self._task_states = task_states
        self._stopping = threading.Event()
        self._term: Term | None = None
        self._next_heartbeat = 0.0
        self._next_upkeep = 0.0

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the loop and resign."""
        self._stopping.set()
        self._wakeup.ring_leader()
        if self.is_alive():
            self.join(timeout_s)

    def run(self) -> None:
        """Loop until `stop`."""
        while not self._stopping.is_set():
            try:
                self._turn()
            except StaleTerm as error:
                log.warning("No longer leading: %s", error)
                self._term, self._next_heartbeat = None, 0.0
            except IntegrityError as error:
                # A device of a placement was leased by another transaction: decide again on a new snapshot.
                log.warning("A placement was overtaken, deciding again: %s", error.orig)
                self._wakeup.ring_leader()
            except SQLAlchemyError:
                log.exception("The broker's database failed; trying again")
                self._stopping.wait(1.0)
            except Exception:
                log.exception("A cycle failed; the next one starts from the tables")
                self._stopping.wait(1.0)
            self._wakeup.wait_for_work(_LOOK_S)
        if self._term is not None:
            self._leadership.resign(self._term)

    def _turn(self) -> None:
        self._keep_lead()
        if time.monotonic() >= self._next_upkeep:
            self._next_upkeep = time.monotonic() + _UPKEEP_S
            self._upkeep()
        if self._term is not None:
            self.cycle(self._term)

    def _keep_lead(self) -> None:
        if time.monotonic() < self._next_heartbeat:
            return
        # A third of the TTL: two heartbeats may be late before another replica takes over.
        self._next_heartbeat = time.monotonic() + self._leadership.ttl_s / 3
        term = self._leadership.acquire()
        if term is not None and (self._term is None or term.number != self._term.number):
            log.info("Leading in term %d as %s", term.number, term.holder)
        self._term = term

    def _upkeep(self) -> None:
        now = self._clock()
        due = self._mirror.unsaved()
        self._nodes.save(due)
        self._mirror.mark_saved(due)
        self._mirror.merge(self._nodes.load())
        if self._term is None:
            return
        self._nodes.forget_before(now - timedelta(seconds=self._settings.forget_nodes_after_s))
        if self._task_states is not None and reconcile(self._repository, self._task_states, now):
            self._wakeup.ring_waiters()

    def cycle(self, term: Term) -> None:
        """Decide once on the present tables."""
        now = self._clock()
        leases, claims = self._decisions.load()
        if not claims and not any(lease.expires_at <= now for lease in leases):
            return
        fleet = self._mirror.fleet(now)
        decisions = decide(Snapshot(fleet, leases, claims), now, self._settings.cycle_policy())
        node_of: dict[DeviceId, str] = {d.id: n.name for n in fleet.nodes for d in n.devices}
        written = self._decisions.write(
            term,
            decisions,
            now=now,
            collect_within_s=self._settings.collect_within_s,
            node_of=node_of,
        )
        for placement in decisions.placements:
            log.info("Granted claim %s: %s", placement.claim_id, ", ".join(placement.devices))
        for rejection in decisions.rejections:
            log.info("Rejected claim %s: %s", rejection.claim_id, rejection.reason.text)
        for lease_id in written.ended:
            log.warning("Lease %s expired: its holder stopped renewing", lease_id)
        if written or decisions.waiting:
            self._wakeup.ring_waiters()
