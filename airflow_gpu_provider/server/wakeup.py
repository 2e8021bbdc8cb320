"""Waking those who wait: the leader's loop (a thread) and long-polling requests (coroutines).

A wake-up is only a hint that the tables may have changed; whoever wakes looks at the tables. Nothing is lost
when a hint is missed, since every waiter also looks again after a while.
"""

from __future__ import annotations

import asyncio
import threading


class Wakeup:
    """One bell for the leader and one for all long-polls of this process."""

    def __init__(self) -> None:
        self._work = threading.Event()
        self._lock = threading.Lock()
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def ring_leader(self) -> None:
        """Tell the leader's loop that there may be something to decide."""
        self._work.set()

    def wait_for_work(self, timeout_s: float) -> bool:
        """Block the calling thread until `ring_leader`, at most `timeout_s`; return whether it rang."""
        rang = self._work.wait(timeout_s)
        self._work.clear()
        return rang

    def ring_waiters(self) -> None:
        """Tell all long-polls that claims may have changed. May be called from any thread."""
        with self._lock:
            waiters = list(self._waiters)
        for loop, event in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def listen(self) -> Listener:
        """Return a context in which hints are not missed between looking and waiting."""
        return Listener(self)

    def _add(self, waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event]) -> None:
        with self._lock:
            self._waiters.add(waiter)

    def _remove(self, waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event]) -> None:
        with self._lock:
            self._waiters.discard(waiter)


class Listener:
    """A long-poll's ear on the bell."""

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup
        self._waiter = (asyncio.get_running_loop(), asyncio.Event())

    def __enter__(self) -> Listener:
        self._wakeup._add(self._waiter)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._wakeup._remove(self._waiter)

    async def wait(self, timeout_s: float) -> None:
        """Return at the next hint, or after `timeout_s`."""
        event = self._waiter[1]
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except asyncio.TimeoutError:
            return
        finally:
            event.clear()
