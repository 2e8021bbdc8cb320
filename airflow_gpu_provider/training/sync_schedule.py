"""How often shards share their state on a slow network, so that a run can be repeated from its record.

`Pace` is the supervisor's judgement of the latency it hears; `SyncSchedule` is what the shards agreed on. A
new interval begins at a synchronisation, which all shards pass together, and the schedule so far is part of
run.json and of every checkpoint: a resumed run goes on with it, and a run that is given it
(`NetworkOptions.sync_schedule`) does the same steps. Pure. Used by `network_watch` and `step_loop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

#: From which synchronised step on which interval holds, in order; before the first one that of the plan.
Entries: TypeAlias = Sequence[tuple[int, int]]

#: Looks in a row (each half a second) that must agree before the interval becomes longer, or shorter.
_LONGER_AFTER = 4
_SHORTER_AFTER = 10
#: It becomes shorter only where the latency is below this part of what would make it longer again.
_CLEARLY = 0.7


class SyncSchedule:
    """The intervals of one run, as one shard knows them."""

    def __init__(self, base: int, fixed: Entries | None = None) -> None:
        """With ``fixed`` the intervals are these, whatever is proposed."""
        self._base = base
        self._fixed = fixed
        self._entries: list[tuple[int, int]] = []

    @property
    def entries(self) -> list[tuple[int, int]]:
        """What was agreed so far."""
        return list(self._entries)

    def interval_after(self, step: int) -> int:
        """Return the interval that follows the synchronisation of this step."""
        return _interval(self._entries, step, self._base)

    def is_due(self, done: int, version: int) -> bool:
        """Say whether state is shared after step ``done``, the last time having been at ``version``.

        Always at a multiple of the plan's interval, so that runs whose interval was longer for a while share
        at the same steps as others afterwards.
        """
        if done % self._base:
            return False
        begun = max(0, version) // self._base * self._base
        return done - begun >= self.interval_after(version)

    def proposal(self, done: int, wanted: int, version: int) -> int:
        """Return the interval that this shard proposes from the synchronisation of step ``done`` on.

        ``wanted`` is the supervisor's word, 0 = none: then it stays as it is.
        """
        if self._fixed is not None:
            return _interval(self._fixed, done, self._base)
        return wanted or self.interval_after(version)

    def agree(self, step: int, interval: int) -> bool:
        """Note what all shards agreed on at a synchronisation; return whether that is a change."""
        self._entries = [entry for entry in self._entries if entry[0] < step]
        if interval < 1 or interval == self.interval_after(step):
            return False
        self._entries.append((step, interval))
        return True

    def take(self, entries: Entries) -> None:
        """Go on with the schedule of another shard or of a checkpoint."""
        self._entries = [(int(step), int(interval)) for step, interval in entries]


class Pace:
    """Which interval a latency calls for: the plan's, times a power of two, up to ``longest``."""

    def __init__(self, base: int, *, threshold_ms: float, longest: int) -> None:
        self._base = base
        self._threshold_ms = threshold_ms
        self._longest = max(1, longest // base)  # as a multiple
        self._factor = 1
        self._above = self._below = 0

    @property
    def interval(self) -> int:
        """The interval called for."""
        return self._base * self._factor

    def resume(self, interval: int) -> None:
        """Begin with the interval that the shards have, such as that of a checkpoint."""
        self._factor = max(1, min(self._longest, interval // self._base))

    def look(self, latency_ms: float | None) -> bool:
        """Take one more measurement, None = not measured; return whether the interval changes by it."""
        if latency_ms is None:
            return False
        longer, shorter = self._factor_for(latency_ms), self._factor_for(latency_ms / _CLEARLY)
        self._above = self._above + 1 if longer > self._factor else 0
        self._below = self._below + 1 if shorter < self._factor else 0
        if self._above >= _LONGER_AFTER:
            self._factor = longer
        elif self._below >= _SHORTER_AFTER:
            self._factor = shorter
        else:
            return False
        self._above = self._below = 0
        return True

    def _factor_for(self, latency_ms: float) -> int:
        """Return the least multiple that brings the latency per step down to what the threshold allows."""
        factor = 1
        while factor < self._longest and factor * self._threshold_ms < latency_ms:
            factor *= 2
        return min(factor, self._longest)


def _interval(entries: Entries, step: int, base: int) -> int:
    return next((interval for start, interval in reversed(entries) if start <= step), base)
