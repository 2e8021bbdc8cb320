"""This replica's part in the election: takes the lead when it is free, keeps it while the loop goes on.

The lead is renewed by a thread of its own, three times in its TTL, so that a turn that takes long (a slow
database, a busy machine) is not taken for a dead replica. It is renewed only while the loop makes progress: a
loop that hangs loses the lead like a process that died. Replicas that follow look again in the moment in
which the lead of the other one ends, not some time after. The next step is the loop of `leader`.
"""

from __future__ import annotations

import logging
import threading
import time

from sqlalchemy.exc import SQLAlchemyError

from airflow_gpu_provider.store.leadership import Leadership, Term

log = logging.getLogger(__name__)

#: A loop that makes no progress for so long hangs.
_HANGS_S = 10.0
#: After the end of another's lead by the database's clock: the row must be past it.
_AFTER_S = 0.01


class Lead:
    """The lead of this replica, if it has it. Used by the leader's thread; `_beat` is the other one."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._next_look = 0.0
        self._progress_at = time.monotonic()
        self._stopping = threading.Event()
        self._term: Term | None = None
        self._lost: Term | None = None
        self._beats = threading.Thread(target=self._beat, name="gpu-broker-heartbeat", daemon=True)

    @property
    def term(self) -> Term | None:
        """The term in which this replica leads; None = another one does."""
        return self._term

    def wait_s(self, most: float) -> float:
        """Return how long the loop may sleep until it has to look at the election."""
        return most if self._term is not None else max(0.0, min(most, self._next_look - time.monotonic()))

    def keep(self) -> bool:
        """Note that the loop goes on and look at the election; return whether the term is another one."""
        self._progress_at = time.monotonic()
        if self._term is not None and self._lost != self._term:
            return False
        if self._term is None and time.monotonic() < self._next_look:
            return False
        before, self._term = self._term, None
        if not self._beats.is_alive() and not self._stopping.is_set():
            self._beats.start()
        term = self._leadership.acquire()
        pause_s = self._leadership.ttl_s / 3
        if self._leadership.free_in_s is not None:
            pause_s = min(pause_s, self._leadership.free_in_s + _AFTER_S)
        self._next_look = time.monotonic() + pause_s
        self._term = term
        if term is not None:
            log.info("Leading in term %d as %s", term.number, term.holder)
        return term != before

    def give_up(self) -> None:
        """Follow from now on: another replica leads, or the database failed. Look again at once."""
        self._term, self._next_look = None, 0.0

    def close(self) -> None:
        """Let another replica take over at once."""
        self._stopping.set()
        term, self._term = self._term, None
        if self._beats.is_alive():
            self._beats.join(_HANGS_S)  # a beat after the resignation would take it back
        if term is not None:
            self._leadership.resign(term)

    def _beat(self) -> None:
        while not self._stopping.wait(self._leadership.ttl_s / 3):
            term = self._term
            if term is None or time.monotonic() - self._progress_at > _HANGS_S:
                continue
            try:
                if not self._leadership.renew(term):
                    self._lost = term
            except SQLAlchemyError as error:
                log.warning("The lead could not be renewed, trying again: %s", error.__class__.__name__)
