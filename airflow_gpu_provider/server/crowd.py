"""How many requests come together, so that a crowd that is arriving shares one commit.

Clients that were answered together ask together again, a millisecond apart. When fewer came than lately, the
leader waits that moment for the rest; a client that is alone is never made to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sized

_WAIT_S = 0.002
_FORGET = 8  # turns until a crowd that left is forgotten


class Crowd:
    """What the leader's thread learns of its queue."""

    def __init__(self, queue: Sized) -> None:
        self._queue = queue
        self._usual = 1.0
        #: so many requests in the queue are worth waking the leader
        self.awaited = 1

    def gather(self, wait: Callable[[float], object]) -> None:
        """Wait until as many are in the queue as came together lately, or a moment."""
        self.awaited = round(self._usual)
        if 0 < len(self._queue) < self.awaited:
            wait(_WAIT_S)
        self.awaited = 1
        came = len(self._queue)
        if came:
            self._usual = max(came, self._usual + (came - self._usual) / _FORGET)
