"""One long-poll for all waiting claims of a triggerer.

Thousands of deferred tasks must not hold thousands of connections: all triggers of an event loop that wait
through the same connection share one `ClaimWatch`, which asks the broker for all their claims with one
request and hands each trigger its own answer.
"""

from __future__ import annotations

import asyncio
import logging
import weakref

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.hooks.transport import LONG_POLL_S
from airflow_gpu_provider.wire import ClaimView, WaitAnswer, WaitBody

log = logging.getLogger(__name__)

_GATHER_S = 0.05  # claims that arrive together are asked for together

_watches: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, ClaimWatch]] = (
    weakref.WeakKeyDictionary()
)


def claim_watch(gpu_conn_id: str) -> ClaimWatch:
    """Return the watch of the running event loop for this connection."""
    of_loop = _watches.setdefault(asyncio.get_running_loop(), {})
    if gpu_conn_id not in of_loop:
        of_loop[gpu_conn_id] = ClaimWatch(GpuBrokerHook(gpu_conn_id))
    return of_loop[gpu_conn_id]


class ClaimWatch:
    """Waits for many claims with one request at a time."""

    def __init__(self, hook: GpuBrokerHook) -> None:
        self._hook = hook
        self._waiting: dict[str, asyncio.Future[ClaimView]] = {}
        self._heard_by: dict[str, int] = {}  #: how many triggers wait for each claim
        self._near_s: float | None = None
        self._joined = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        #: the broker's name of this watch, and the claims that it knows of
        self._watch: str | None = None
        self._named: set[str] = set()

    async def wait(self, claim_id: str, *, near_s: float | None) -> ClaimView:
        """Return the claim as soon as it is no longer pending, or its turn is at most `near_s` away.

        Raise the error that the broker's answer stands for when the request itself fails.
        """
        future = self._waiting.get(claim_id)
        if future is None:
            future = self._waiting[claim_id] = asyncio.get_running_loop().create_future()
        self._near_s = near_s
        self._heard_by[claim_id] = self._heard_by.get(claim_id, 0) + 1
        self._joined.set()
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll(), name=f"gpu claims of {self._hook.gpu_conn_id}")
        try:
            # Shielded: one cancelled trigger must not cancel another's wait for the same claim.
            return await asyncio.shield(future)
        finally:
            self._heard_by[claim_id] -= 1
            if not self._heard_by[claim_id]:
                del self._heard_by[claim_id]
                if not future.done():
                    self._waiting.pop(claim_id, None)
                    future.cancel()

    async def _poll(self) -> None:
        """Ask for all waiting claims, again and again, until none is left."""
        while True:
            try:
                while self._waiting:
                    await self._ask()
            finally:
                self._watch, self._named = None, set()
                await self._hook.aclose()
            if not self._waiting:  # nobody joined while the connection was closed
                return

    async def _ask(self) -> None:
        """Name the claims that the broker does not know of yet, then wait; who joins is named meanwhile."""
        await asyncio.sleep(_GATHER_S)
        await self._name()
        if self._watch is None or not self._waiting:
            return
        question = self._question(timeout_s=LONG_POLL_S)
        request = asyncio.create_task(self._hook.wait_any(question))
        try:
            while not request.done():
                self._joined.clear()
                joined = asyncio.create_task(self._joined.wait())
                await asyncio.wait({request, joined}, return_when=asyncio.FIRST_COMPLETED)
                joined.cancel()
                if not request.done():
                    # The request in flight goes on: a joining claim must not make the others start anew.
                    await asyncio.sleep(_GATHER_S)
                    await self._name()
            self._answer(question, request)
        finally:
            if not request.done():
                request.cancel()

    async def _name(self) -> None:
        question = self._question(timeout_s=0.0)
        if question.claim_ids or question.watch is None:
            request = asyncio.create_task(self._hook.wait_any(question))
            await asyncio.wait({request})
            self._answer(question, request)

    def _question(self, *, timeout_s: float) -> WaitBody:
        waiting = set(self._waiting)
        return WaitBody(
            claim_ids=tuple(sorted(waiting - self._named)),
            drop=tuple(sorted(self._named - waiting)),
            watch=self._watch,
            near_s=self._near_s,
            timeout_s=timeout_s,
        )

    def _answer(self, question: WaitBody, request: asyncio.Task[WaitAnswer]) -> None:
        error = request.exception()
        if error is not None:
            log.warning("Waiting for %d claims failed: %s", len(self._waiting), error)
            self._watch, self._named = None, set()
            for claim_id in list(self._waiting):
                self._settle(claim_id, error)
            return
        answer = request.result()
        self._watch = answer.watch
        if answer.watch is None:  # another replica answered, or ours started anew: name all claims again
            self._named = set()
            return
        self._named = (self._named | set(question.claim_ids)) - set(question.drop) - set(answer.unknown)
        for claim_id in answer.unknown:
            self._settle(
                claim_id, InvalidRequest(f"The broker knows no claim {claim_id}.", reason="unknown_claim")
            )
        for view in answer.ready:
            self._settle(view.claim_id, view)

    def _settle(self, claim_id: str, outcome: ClaimView | BaseException) -> None:
        future = self._waiting.pop(claim_id, None)
        if future is None or future.done():
            return
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
