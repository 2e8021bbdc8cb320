"""What a replica does once a second beside the leader's turns: no grant waits for it, however slow it is.

Every replica stores what agents reported to it and reads what the others know: nodes, drains, reservations,
finished runs. The one that leads also stores what is kept for reservations and forgets old history. Only
the broker's database is asked here; the engine and the board belong to the leader's thread, which sees the
new versions in its next turn (`leader`). Airflow's database has a thread of its own, `reconciler`; this one
says when that hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from airflow_gpu_provider.server.other_reports import take_in
from airflow_gpu_provider.server.reconciler import Reconciler, TaskStates

if TYPE_CHECKING:
    from airflow_gpu_provider.server.broker import Broker

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_CLEAN_UP_S = 600.0  # old history out of the database
_STOPS_S = 10.0


class Upkeep(threading.Thread):
    """The thread that does it until `stop`."""

    def __init__(self, broker: Broker, task_states: TaskStates | None) -> None:
        super().__init__(name="gpu-broker-upkeep", daemon=True)
        self._broker = broker
        ttl_s = broker.settings.lease_ttl_s
        self.reconciler = Reconciler(broker.desk, task_states, ttl_s=ttl_s, clock=broker.clock)
        self._stopping = threading.Event()
        self._next_clean_up = 0.0

    def stop(self) -> None:
        """End the loop."""
        self._stopping.set()
        self.reconciler.stop()
        if self.is_alive():
            self.join(_STOPS_S)

    def run(self) -> None:
        """Loop until `stop`. What fails is tried again a second later."""
        self.reconciler.start()
        while not self._stopping.wait(_EVERY_S):
            try:
                self.reconciler.tell(self._broker.clock())
                self._share_what_is_known()
                if self._broker.desk.is_open:
                    self._keep_order()
            except SQLAlchemyError as error:
                log.warning("The upkeep failed in the database, trying again: %s", error)
            except Exception:
                log.exception("The upkeep failed; trying again")

    def _share_what_is_known(self) -> None:
        broker, now = self._broker, self._broker.clock()
        mirror, nodes, before = broker.mirror, broker.nodes, broker.mirror.version
        changed, alive = mirror.unsaved()
        nodes.save(changed)
        others = nodes.touch(alive, now)
        nodes.save(mirror.stored(others))
        mirror.mark_saved(changed, alive)
        take_in(mirror, nodes)
        mirror.age(now)
        broker.drains.refresh()
        broker.reservations.refresh()
        broker.history.refresh()
        if mirror.version != before:
            broker.wakeup.ring_leader()

    def _keep_order(self) -> None:
        broker = self._broker
        if broker.desk.engine is not None:
            broker.reservations.note(broker.desk.engine.keeping.kept)
        if time.monotonic() < self._next_clean_up:
            return
        self._next_clean_up = time.monotonic() + _CLEAN_UP_S
        now, settings = broker.clock(), broker.settings
        broker.nodes.forget_before(now - timedelta(seconds=settings.forget_nodes_after_s))
        broker.asks.clean_up()
        forgotten_at = now - timedelta(days=settings.history_days)
        for store in (broker.store, broker.runs, broker.reservations):
            store.forget_before(forgotten_at)
