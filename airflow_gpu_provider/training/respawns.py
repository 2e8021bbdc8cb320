"""How many lost processes are started anew: a budget that progress refills.

A run that loses a shard every few minutes for a week trains well; one that loses them all at the same step
never gets past it. What tells them apart is whether a new state was shared since the last start. Pure; used
by `supervisor`.
"""

from __future__ import annotations


class RespawnBudget:
    """What is left of ``limit`` starts since the last progress."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spent = 0
        self._version = -1  #: the newest shared state when the last one was spent

    def left(self, version: int) -> int:
        """Return how many processes may be started while ``version`` is the newest shared state."""
        return self._limit if version > self._version else self._limit - self._spent

    def spend(self, version: int) -> None:
        """Count one start. Ask `left` before."""
        self._spent = self._limit - self.left(version) + 1
        self._version = max(self._version, version)
