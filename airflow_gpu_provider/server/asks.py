"""Takes what only the leader can answer to it, whichever replica was asked, and brings the answer back.

A change of a lease needs the leader's engine: no tables say what is free behind those who wait. A replica
that does not lead writes the request as a question; the leader hears of it by its event, serves it at its
desk and writes the answer. A leader that dies leaves the question to the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from airflow_gpu_provider.exceptions import (
    BrokerUnavailable,
    GpuProviderError,
    InvalidRequest,
    LeaseLost,
    NotResized,
)
from airflow_gpu_provider.server.board import Entry
from airflow_gpu_provider.server.changes import AcceptMove, Change, CommitMove, DeclineMove, Resize
from airflow_gpu_provider.server.desk import Desk
from airflow_gpu_provider.server.draft import NotLeading
from airflow_gpu_provider.store.asks import AskStore, Question

log = logging.getLogger(__name__)

_KINDS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind) for kind in (Resize, AcceptMove, CommitMove, DeclineMove)
}
_ERRORS = {kind.__name__: kind for kind in (NotResized, LeaseLost, InvalidRequest)}

PATIENCE_S = 10.0  # longer than a take-over, shorter than a client waits for an answer
_LOOK_S = 0.05


class Asks:
    """The questions of this replica's callers, and those that it answers while it leads."""

    def __init__(self, engine: Engine, desk: Desk) -> None:
        self._store = AskStore(engine)
        self._desk = desk
        self._being_served: set[int] = set()
        #: writes the answers: the leader's turns wait for nobody's answer
        self._writer = ThreadPoolExecutor(1, "gpu-broker-answers")

    # -- the replica that was asked
    async def ask(self, request: Change) -> tuple[str, int]:
        """Let the leader serve a request; return whose lease it changed, and what others want back of it."""
        kind = type(request).__name__
        body = _KINDS[kind].dump_python(request, mode="json")
        put = partial(self._store.put, request.lease_id, request.epoch, kind, body)
        question = await run_in_threadpool(put)
        try:
            return await self._answer_to(question)
        finally:
            await run_in_threadpool(self._store.take_back, question.id)

    async def _answer_to(self, question: Question) -> tuple[str, int]:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
            answer = await run_in_threadpool(self._store.look, question.id)
            if answer is None:
                continue
            if answer["error"] is None:
                return question.claim_id, answer.get("wanted_back", 0)
            raise _ERRORS.get(answer["error"], BrokerUnavailable)(answer["message"], reason=answer["reason"])
        raise BrokerUnavailable(
            f"No replica that leads answered within {PATIENCE_S:g} s. The lease may have changed: ask "
            "again, which is harmless."
        )

    # -- the leader's thread
    def serve(self, claim_ids: Sequence[str] | None = None) -> None:
        """Put the open questions (about these claims) on the desk."""
        for question in self._store.unanswered(PATIENCE_S, claim_ids):
            if question.id not in self._being_served:
                self._being_served.add(question.id)
                request: Change = _KINDS[question.kind].validate_python(question.body)
                is_wanted = partial(self._store.is_open, question.id, PATIENCE_S)
                served = self._desk.ask(request, is_wanted=is_wanted)
                served.add_done_callback(partial(self._answer, question.id))

    def close(self) -> None:
        """Write the answers that are under way."""
        self._writer.shutdown()

    def clean_up(self) -> None:
        """Forget what replicas that died did not take back."""
        self._store.forget_older(2 * PATIENCE_S)

    def _answer(self, number: int, served: Future[Entry]) -> None:
        error = served.exception()
        if isinstance(error, NotLeading):
            self._being_served.discard(number)
            return  # the next leader finds the question
        told: dict[str, Any] = {"error": None}
        if error is None:
            if (held := served.result().held) is not None and held.wanted_back:
                told["wanted_back"] = held.wanted_back
        else:
            reason = error.reason if isinstance(error, GpuProviderError) else "failed"
            told = {"error": type(error).__name__, "reason": reason, "message": str(error)}
        self._writer.submit(self._write, number, told)

    def _write(self, number: int, told: dict[str, Any]) -> None:
        try:
            self._store.answer(number, told)
        except SQLAlchemyError as error:
            # Who asked hears nothing and asks again, which is harmless.
            log.warning("The answer to another replica's question %d was not written: %s", number, error)
        finally:
            self._being_served.discard(number)  # not before: the question looks unanswered until then
