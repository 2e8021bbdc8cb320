"""Waking the leader's loop from any thread.

A wake-up is only a hint that there may be something to do; the loop looks by itself and also without one, so
nothing is lost when a hint is missed.
"""

from __future__ import annotations

import threading


class Wakeup:
    """The leader's bell."""

    def __init__(self) -> None:
        self._work = threading.Event()

    def ring_leader(self) -> None:
        """Tell the leader's loop that there may be something to decide."""
        self._work.set()

    def wait_for_work(self, timeout_s: float) -> bool:
        """Block the calling thread until `ring_leader`, at most `timeout_s`; return whether it rang."""
        rang = self._work.wait(timeout_s)
        self._work.clear()
        return rang
