"""The broker's time: the database's, which all replicas share, carried on by what has passed since.

Leases outlive replicas, so the time at which they end must mean the same on all of them. What the database
tells with the election is taken with half the round trip, and corrected only as far as a later answer proves
it wrong. The machine's own clock may be wrong, or be moved: nothing goes by it. SQLite has no clock of its
own; there the machine's counts once, at the start. The next step is `store.leadership`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

from airflow_gpu_provider.exceptions import BrokerUnavailable

log = logging.getLogger(__name__)

#: A machine's clock that is further off is told of.
_SKEW = timedelta(seconds=5)
#: The database's clock was changed when it is further off; by less it is waited for.
_STEP = timedelta(seconds=2)


def utc_now() -> datetime:
    """Return the time of this machine's clock."""
    return datetime.now(timezone.utc)


class BrokerClock:
    """The time that is stored, and compared with what is stored. Thread-safe."""

    def __init__(
        self,
        *,
        follows: bool,
        wall: Callable[[], datetime] = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """With ``follows`` it goes by what it is told with `hear`, else by `wall` as of now."""
        self._follows = follows
        self._wall = wall
        self._monotonic = monotonic
        self._lock = threading.Lock()
        #: the time at which the monotonic clock was 0
        self._zero = None if follows else wall() - timedelta(seconds=monotonic())
        self._doubt = timedelta()  # how far `_zero` may be off
        self._last: datetime | None = None
        self._has_told = False
        #: called when the database's clock was changed, so that time may have gone back
        self.on_step: Callable[[], None] = lambda: None

    def __call__(self) -> datetime:
        """Return the time; it goes back only with `on_step`. Raise BrokerUnavailable before `hear`."""
        with self._lock:
            if self._zero is None:
                raise BrokerUnavailable(
                    "This replica has not heard the time from its database yet; ask again."
                )
            now = self._zero + timedelta(seconds=self._monotonic())
            self._last = now if self._last is None else max(now, self._last)
            return self._last

    def hear(self, stamp: datetime, asked_at: float, answered_at: float) -> None:
        """Take what the database said the time was, between these two of the monotonic clock."""
        trip = timedelta(seconds=answered_at - asked_at)
        earliest = stamp - timedelta(seconds=answered_at)
        with self._lock:
            is_step = False
            if self._zero is None:
                zero, self._doubt = earliest + trip / 2, trip / 2
            else:
                zero = min(max(self._zero, earliest), earliest + trip) if self._follows else self._zero
                is_step = abs(zero - self._zero) > _STEP + self._doubt
                self._doubt = trip if is_step else min(self._doubt, trip)
            self._zero = zero
            if is_step:
                self._last = None
            skew = self._wall() - (zero + timedelta(seconds=self._monotonic()))
        if is_step:
            log.warning("The database's clock was changed, or this machine slept: leases go by the new time")
            self.on_step()
        self._tell(skew)

    def _tell(self, skew: timedelta) -> None:
        if abs(skew) <= _SKEW + self._doubt or self._has_told:
            return
        self._has_told = True
        off = f"{abs(skew).total_seconds():.0f} s {'ahead of' if skew > timedelta() else 'behind'}"
        if self._follows:
            log.warning(
                "The clock of this machine is %s the database's. No lease depends on it, but tokens and logs "
                "do: let NTP (chrony, systemd-timesyncd) set the clocks of all machines.",
                off,
            )
        else:
            log.warning(
                "The clock of this machine was changed, or the machine slept: it is %s the broker's, which "
                "goes on as if not, for the sake of the leases. Let NTP set the clock, and restart the "
                "broker when nothing is leased, so that reservations go by the new time.",
                off,
            )
