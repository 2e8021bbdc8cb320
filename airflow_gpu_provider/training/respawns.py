"""How many lost processes are started anew: a budget that progress refills.

A run that loses a shard every few minutes for a week trains well; one that loses them all at the same step
never gets past it. What tells them apart is whether a new state was shared since the last start. A script
shares none: there a new file has to do, which one that fails at once may write each time, so that restarts
are limited otherwise too. Pure; used by `supervisor` and `script_supervisor`.
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


def unfilled(vacant: int, left: int, limit: int, *, last: str) -> str:
    """Say why ranks stay vacant, with ``left`` of ``limit`` starts, and what would help."""
    used = f"all {limit} respawns are used without progress in between"
    return (
        f"{vacant} more shard(s) were lost than there were spares, and "
        f"{'all other devices are suspect' if left else used}; the last: {last}. A retry resumes from the "
        "last checkpoint; raise redundancy to keep more spares."
    )


class RestartBudget:
    """The restarts of a script: `limit` without anything new saved, ten times that without a long round."""

    #: a round of so many seconds shows that the script can train here
    STEADY_S = 600.0
    _FACTOR = 10

    def __init__(self, limit: int) -> None:
        self._saving = RespawnBudget(limit)
        self.most = self._FACTOR * limit  #: restarts in a row whose rounds were all short
        self._short = 0

    def left(self, saved_at_ns: int, *, lasted_s: float) -> int:
        """Return how many restarts are left after a round of ``lasted_s``, the newest file being that old."""
        short = 0 if lasted_s >= self.STEADY_S else self._short
        return min(self._saving.left(saved_at_ns), self.most - short)

    def is_saving(self, saved_at_ns: int) -> bool:
        """Say whether it is not for lack of new files that nothing is left."""
        return self._saving.left(saved_at_ns) > 0

    def spend(self, saved_at_ns: int, *, lasted_s: float) -> None:
        """Count one restart. Ask `left` before."""
        self._saving.spend(saved_at_ns)
        self._short = 1 if lasted_s >= self.STEADY_S else self._short + 1
