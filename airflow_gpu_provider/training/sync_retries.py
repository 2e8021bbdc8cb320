"""When a broken synchronisation is tried again, and when that is given up.

A collective that fails usually means that a peer died, which is noticed a moment later and handled as a
takeover. Only when nobody died is it the network: then the same shards form a new generation, a few times
for each step they have reached. Pure; used by `supervisor`.
"""

from __future__ import annotations

from enum import Enum

#: for the death that explains a broken collective to be noticed
GRACE_S = 0.5
MAX_TRIES = 5


class Verdict(str, Enum):
    """What to do about a broken synchronisation."""

    WAIT = "wait"
    """Its cause may still show."""
    RETRY = "retry"
    """The same shards try again."""
    GIVE_UP = "give_up"
    """It failed too often without any progress in between."""


class SyncRetries:
    """Counts the retries since the last progress."""

    def __init__(self) -> None:
        self._broken_at: float | None = None
        self._version = -1
        self.tries = 0

    def judge(self, *, version: int, now: float) -> Verdict:
        """Return what to do about the present generation's broken synchronisation after step ``version``."""
        if self._broken_at is None:
            self._broken_at = now
        if now - self._broken_at < GRACE_S:
            return Verdict.WAIT
        self._broken_at = None
        self.tries = self.tries + 1 if version == self._version else 1
        self._version = version
        return Verdict.RETRY if self.tries <= MAX_TRIES else Verdict.GIVE_UP

    def explained(self) -> None:
        """Forget the present break: a lost shard explains it."""
        self._broken_at = None
