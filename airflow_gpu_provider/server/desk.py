"""Where the leader serves requests: many at a time, one turn after another.

A turn takes all that was asked since the last one, applies it to the engine, lets it decide, and writes the
whole in one transaction; then everyone gets an answer. So a thousand small requests a second share a few
hundred commits, and no answer is given before it is durable. When a turn cannot be written (another replica
wrote meanwhile), nothing of it holds: the desk loads the tables again and repeats the requests, which their
keys make harmless. Used by the leader's thread only, but for `ask`.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import datetime

from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import Decisions, DeviceId, LeaseId
from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.exceptions import BrokerUnavailable, InvalidRequest
from airflow_gpu_provider.server.board import Board, Entry
from airflow_gpu_provider.server.changes import Change, lapse
from airflow_gpu_provider.server.crowd import Crowd
from airflow_gpu_provider.server.draft import Asked, Draft, NotLeading, fail
from airflow_gpu_provider.server.grants import grant
from airflow_gpu_provider.server.preempting import is_over, take_back, wait_again
from airflow_gpu_provider.server.requests import Request, Submit, apply
from airflow_gpu_provider.store.endings import Ending
from airflow_gpu_provider.store.history import DeviceOf
from airflow_gpu_provider.store.leadership import StaleTerm, Term
from airflow_gpu_provider.store.turns import Overtaken, Turn, TurnStore
from airflow_gpu_provider.wire import ClaimState

_ATTEMPTS = 5


class Desk:
    """The requests of this replica's term."""

    def __init__(
        self,
        settings: Settings,
        store: TurnStore,
        *,
        clock: Callable[[], datetime],
        wake: Callable[[], None],
        decided: Callable[[Sequence[str]], None],
        device_of: DeviceOf = lambda device: None,
    ) -> None:
        self.settings = settings
        self.store = store
        self.device_of = device_of
        self.board = Board()
        self.engine: Engine | None = None
        #: claims whose asker waits on an open connection: their leases are collected when granted
        self.attended: set[str] = set()
        self._clock = clock
        self._wake = wake
        self._decided = decided
        self._queue: deque[Asked] = deque()
        self.crowd = Crowd(self._queue)
        self._lock = threading.Lock()
        self._is_open = False
        self._alone = 0  #: so many of the next turns take one request each

    # -- any thread
    def ask(
        self, request: Request, *, until: float = math.inf, is_wanted: Callable[[], bool] | None = None
    ) -> Future[Entry]:
        """Queue a request for the next turn. The future raises NotLeading when there will be none."""
        answer: Future[Entry] = Future()
        self.put(Asked(request, answer, until=until, is_wanted=is_wanted))
        return answer

    def put(self, asked: Asked) -> None:
        """Queue a request for the next turn; its answer is NotLeading when there will be none."""
        with self._lock:
            if self._is_open:
                self._queue.append(asked)
                if len(self._queue) >= self.crowd.awaited:
                    self._wake()
                return
        asked.answer.set_exception(NotLeading("This replica does not lead."))

    def submitted_keys(self) -> list[tuple[str, str, str, int, int]]:
        """Return the task tries of queued claims that were tried before."""
        with self._lock:
            bodies = [a.request.body for a in self._queue if isinstance(a.request, Submit)]
        return [
            (b.key.dag_id, b.key.run_id, b.key.task_id, b.key.map_index, b.key.try_number) for b in bodies
        ]

    # -- the leader's thread
    @property
    def is_open(self) -> bool:
        """Return whether requests are taken."""
        return self._is_open

    def open(self, board: Board, engine: Engine) -> None:
        """Begin to serve, with the tables as they are now."""
        self.board, self.engine = board, engine
        with self._lock:
            self._is_open = True

    def close(self) -> None:
        """Stop serving; whoever waits for an answer hears that this replica does not lead."""
        with self._lock:
            self._is_open = False
            left = [each for each in self._queue if each.begin()]
            self._queue.clear()
        fail(left, NotLeading("This replica does not lead any more."))

    def turn(self, term: Term) -> bool:
        """Serve what was asked and decide; return whether anything changed.

        Raise Overtaken or IntegrityError when the tables are not what the board shows: the caller loads
        them and calls again; the requests are kept for a few attempts. After any other error the caller
        loads the tables too; every request is answered or kept.
        """
        if self.engine is None:
            return False
        asked = self._next()
        try:
            postponed, answers, draft = self._draft(asked)
            if not draft.turn.is_empty():
                draft.turn.holders = {
                    each: self.board.by_lease[each].claim_id for each in draft.turn.leases()
                }
                self.store.write(term, draft.turn)
        except (Overtaken, IntegrityError) as error:
            self._keep(self._still_tried(asked, error))
            raise
        except StaleTerm:
            fail(asked, NotLeading("This replica does not lead any more."))
            raise
        except SQLAlchemyError as error:
            fail(asked, BrokerUnavailable(f"The broker's database failed: {error.__class__.__name__}."))
            raise
        except Exception as error:
            self._isolate(asked, error)
            raise
        try:
            for act in draft.then:
                act()
            for each, entry in answers:
                each.answer.set_result(entry)
            self._keep(postponed)
        finally:
            # The turn is written: whoever has no answer yet finds it in the tables.
            fail([each for each, _ in answers], NotLeading("The turn was written, its picture was not."))
        return not draft.turn.is_empty()

    def _next(self) -> list[Asked]:
        """Take what was asked since the last turn, or one request alone while one of them is poison."""
        with self._lock:
            most = 1 if self._alone > 0 else len(self._queue)
            self._alone = max(0, self._alone - 1)
            taken = [self._queue.popleft() for _ in range(min(most, len(self._queue)))]
        return [each for each in taken if each.begin()]

    def _isolate(self, asked: Sequence[Asked], error: Exception) -> None:
        """Find the request that cannot be judged: the others must not suffer with it."""
        if len(asked) == 1:
            fail(asked, InvalidRequest(f"The broker cannot judge this request: {error}", reason="not_judged"))
            return
        self._alone = len(asked)
        self._keep(asked)

    def _draft(self, asked: Sequence[Asked]) -> tuple[list[Asked], list[tuple[Asked, Entry]], Draft]:
        draft = Draft(Turn(self._clock()))
        postponed: list[Asked] = []
        answers: list[tuple[Asked, Entry]] = []
        for is_behind in (False, True):
            for each in asked:
                if isinstance(each.request, Change) is not is_behind:
                    continue
                try:
                    each.check_wanted()
                    entry = apply(each.request, self, draft)
                except Exception as error:
                    each.answer.set_exception(error)  # refused: the request is wrong, the turn is not
                    continue
                if entry is None:
                    postponed.append(each)
                else:
                    answers.append((each, entry))
            if not is_behind:
                self._decide(draft)
        return postponed, answers, draft

    def _keep(self, asked: Iterable[Asked]) -> None:
        kept = [each for each in asked if not each.answer.done()]
        if not kept:
            return
        with self._lock:
            if self._is_open:
                self._queue.extendleft(reversed(kept))
                self._wake()
                return
        fail(kept, NotLeading("This replica does not lead any more."))

    def _still_tried(self, asked: Sequence[Asked], error: Exception) -> list[Asked]:
        kept = []
        for each in asked:
            each.attempts += 1
            if each.attempts < _ATTEMPTS:
                kept.append(each)
            else:
                fail([each], BrokerUnavailable(f"Others changed the same again and again: {error}"))
        return kept

    # -- deciding
    def _decide(self, draft: Draft) -> None:
        assert self.engine is not None
        decisions = self.engine.turn(draft.turn.now)
        for lease_id in decisions.expired:
            self._expire(lease_id, draft)
        self._reject(decisions, draft)
        for placement in decisions.placements:
            grant(placement, self, draft)
        for lease_id in decisions.lapsed:
            lapse(self.board.by_lease[lease_id], self, draft)
        take_back(decisions, self, draft)

    def entry(self, claim_id: str, draft: Draft) -> Entry:
        """Return a claim that waits or holds, or was just asked for in this turn."""
        return draft.new.get(claim_id) or self.board.entries[claim_id]

    def _expire(self, lease_id: LeaseId, draft: Draft) -> None:
        entry = self.board.by_lease[lease_id]
        if entry.held is not None and is_over(entry.held, draft.turn.now):
            wait_again(entry, entry.held, self, draft)
            return
        draft.turn.expired.append(Ending(entry.claim_id, "expired", lease_id))
        draft.then.append(lambda: self.end(entry, ClaimState.ENDED, "expired"))

    def _reject(self, decisions: Decisions, draft: Draft) -> None:
        for rejection in decisions.rejections:
            entry, reason = self.entry(rejection.claim_id, draft), rejection.reason
            draft.turn.rejected.append((rejection.claim_id, reason.code.value, reason.text))
            draft.then.append(
                lambda entry=entry, reason=reason: self.end(  # type: ignore[misc]
                    entry, ClaimState.REJECTED, reason.code.value, reason.text
                )
            )

    def end(self, entry: Entry, state: ClaimState, reason_code: str, reason: str | None = None) -> None:
        """Show on the board that a claim is over, and tell those who wait for it."""
        self.board.close(entry, state, reason_code, reason)
        self._decided([entry.claim_id])

    def tell(self, claim_id: str) -> None:
        """Let those hear of a claim who wait for it."""
        self._decided([claim_id])

    #: the node of each device, set with the fleet
    node_of: dict[DeviceId, str] = {}  # noqa: RUF012 - replaced as a whole, never changed
