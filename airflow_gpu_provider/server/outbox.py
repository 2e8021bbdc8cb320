"""Answers on their way from the leader's thread to the coroutines that wait for them.

A turn answers many requests at once. Each answer could wake the event loop by itself, as `wrap_future` does;
here they queue up and one wake-up delivers all of them. The order is kept. An answer that nobody waits for
any more is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque

from airflow_gpu_provider.server.board import Entry


class Outbox:
    """The answers for one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._answers: deque[tuple[asyncio.Future[Entry], Entry | Exception]] = deque()
        self._is_called = False

    def expect(self) -> Expected:
        """Return the place for an answer. On the loop's thread."""
        return Expected(self, self.loop.create_future())

    def put(self, future: asyncio.Future[Entry], answer: Entry | Exception) -> None:
        """Send an answer. On any thread."""
        self._answers.append((future, answer))
        if self._is_called or self.loop.is_closed():
            return
        self._is_called = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # closed in this moment: nobody waits
            self._answers.clear()

    def _deliver(self) -> None:
        # First this, then the answers: whoever puts one meanwhile calls again.
        self._is_called = False
        while self._answers:
            future, answer = self._answers.popleft()
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


class Expected:
    """An answer that a coroutine waits for, with the methods of a future that the desk uses."""

    __slots__ = ("_is_begun", "_is_given", "_outbox", "future")

    def __init__(self, outbox: Outbox, future: asyncio.Future[Entry]) -> None:
        self.future = future
        self._outbox = outbox
        self._is_begun = self._is_given = False

    def done(self) -> bool:
        """Return whether the answer was given, or called off before the desk began."""
        return self._is_given or (not self._is_begun and self.future.done())

    def running(self) -> bool:
        """Return whether the desk began to serve the request."""
        return self._is_begun

    def set_running_or_notify_cancel(self) -> bool:
        """Begin, unless nobody waits any more."""
        self._is_begun = not self.future.done()
        return self._is_begun

    def set_result(self, entry: Entry) -> None:
        """Give the answer."""
        self._give(entry)

    def set_exception(self, error: Exception) -> None:
        """Give a refusal."""
        self._give(error)

    def _give(self, answer: Entry | Exception) -> None:
        self._is_given = True
        self._outbox.put(self.future, answer)
