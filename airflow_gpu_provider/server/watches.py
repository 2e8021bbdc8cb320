"""Who waits for which claims, so that a decision reaches them at once and costs nothing for the others.

A triggerer waits for thousands of claims with one request after another. It names them once; the watch stays
on this replica between its requests, and each request only says what to add and what it has heard of. An
answer that got lost is given again, since only the next request takes claims off the watch.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Iterable, Sequence

_FORGET_S = 120.0


class Watch:
    """The claims that one client waits for."""

    def __init__(self, near_s: float | None) -> None:
        self.name = uuid.uuid4().hex
        self.near_s = near_s
        self.claim_ids: set[str] = set()
        self.ready: set[str] = set()
        self.used_at = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._rang = asyncio.Event()

    def ring(self, claim_ids: Iterable[str]) -> None:
        """Note claims that need no more waiting. May be called from any thread."""
        self.ready.update(claim_ids)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._rang.set)

    async def wait(self, timeout_s: float) -> None:
        """Return when something is ready, or after `timeout_s`."""
        if self.ready or timeout_s <= 0:
            return
        try:
            await asyncio.wait_for(self._rang.wait(), timeout_s)
        except asyncio.TimeoutError:
            return
        finally:
            self._rang.clear()


class Watches:
    """All watches of this replica."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: dict[str, Watch] = {}
        self._of_claim: dict[str, set[Watch]] = {}

    def begin(self, near_s: float | None) -> Watch:
        """Return a new watch."""
        watch = Watch(near_s)
        with self._lock:
            self._forget_idle()
            self._watches[watch.name] = watch
        return watch

    def find(self, name: str) -> Watch | None:
        """Return the watch of that name; None when this replica has none (any more)."""
        watch = self._watches.get(name)
        if watch is not None:
            watch.used_at = time.monotonic()
        return watch

    def add(self, watch: Watch, claim_ids: Iterable[str]) -> None:
        """Wait for these claims too."""
        with self._lock:
            for claim_id in claim_ids:
                watch.claim_ids.add(claim_id)
                self._of_claim.setdefault(claim_id, set()).add(watch)

    def drop(self, watch: Watch, claim_ids: Iterable[str]) -> None:
        """Wait for these claims no more."""
        with self._lock:
            self._drop(watch, claim_ids)

    def end(self, watch: Watch) -> None:
        """Forget a watch."""
        with self._lock:
            self._drop(watch, list(watch.claim_ids))
            self._watches.pop(watch.name, None)

    def ring(self, claim_ids: Sequence[str]) -> None:
        """Tell those who wait for these claims. May be called from any thread."""
        with self._lock:  # held while ringing: a claim that is dropped must not be noted again
            for claim_id in claim_ids:
                for watch in self._of_claim.get(claim_id, ()):
                    watch.ring([claim_id])

    def _drop(self, watch: Watch, claim_ids: Iterable[str]) -> None:
        for claim_id in claim_ids:
            watch.claim_ids.discard(claim_id)
            watch.ready.discard(claim_id)
            watches = self._of_claim.get(claim_id)
            if watches is not None:
                watches.discard(watch)
                if not watches:
                    del self._of_claim[claim_id]

    def _forget_idle(self) -> None:
        now = time.monotonic()
        for watch in [w for w in self._watches.values() if now - w.used_at > _FORGET_S]:
            self._drop(watch, list(watch.claim_ids))
            del self._watches[watch.name]
