"""Until when a lease is good, as the broker's answers to its renewals tell.

Usually another TTL from when it was asked. A lease that is taken back for other work ends sooner: its work
is told (`ending`) and has a grace period to save what it did. Lengths of time, not moments, come from the
broker, since clocks differ. Written by the renewing thread, read by the others; next: `held_lease`.
"""

from __future__ import annotations

import logging
import threading
import time

from airflow_gpu_provider.exceptions import LeaseLost, LeasePreempted
from airflow_gpu_provider.wire import RenewAnswer

log = logging.getLogger(__name__)

#: Restarts of the broker last longer than one renewal: several may fail before the lease ends.
_RENEWALS_PER_TTL = 6


def renewal_pause_s(ttl_s: float) -> float:
    """Return how long a holder waits between renewals of a lease."""
    return ttl_s / _RENEWALS_PER_TTL


class LeaseTime:
    """The time that is left of one lease."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.good_until = time.monotonic() + ttl_s
        #: set when the lease is being taken back
        self.ending = threading.Event()
        #: set instead of being taken back when the task is over
        self._over: LeaseLost | None = None
        self._why = ""
        self._checkpoint_at: float | None = None

    def left_s(self) -> float:
        """Return how long the lease is good if no renewal succeeds."""
        return self.good_until - time.monotonic()

    def why_over(self, lease_id: str) -> str:
        """Return why the work ends, since no time is left."""
        if self.ending.is_set():
            return f"Lease {lease_id} had to end, and its work did not stop in time."
        return (
            f"Lease {lease_id} could not be renewed within its TTL of {self.ttl_s:g} s: the broker was away "
            "or out of reach for longer than [gpu] lease_ttl_s allows for."
        )

    @property
    def is_preempted(self) -> bool:
        """True when the lease is being taken back for other work."""
        return self.ending.is_set() and self._over is None

    def over(self, why: LeaseLost) -> None:
        """Let the work save itself in the time that is left: its task is over."""
        log.warning("%s", why.message)
        self._over = why
        self.ending.set()

    def renewed(self, answer: RenewAnswer, *, asked_at: float) -> None:
        """Take the answer to a renewal that was asked for at `asked_at` (monotonic seconds)."""
        ends_in_s = answer.ends_in_s
        self.good_until = asked_at + (self.ttl_s if ends_in_s is None else min(self.ttl_s, ends_in_s))
        if ends_in_s is None and self._over is None:
            self.ending.clear()  # whom it was for went away
        elif ends_in_s is not None and not self.ending.is_set():
            self._why = answer.reason or "The lease is being taken back."
            log.warning("The lease ends in %.0f s: %s", ends_in_s, self._why)
            self.ending.set()

    def raise_if_ending(self) -> None:
        """Raise LeasePreempted when the lease is being taken back, LeaseLost when its task is over."""
        if self._over is not None:
            raise self._over
        if self.ending.is_set():
            raise LeasePreempted(self._why)

    def note_checkpoint(self) -> None:
        """Remember that the work was saved now."""
        self._checkpoint_at = time.monotonic()

    def saved_s(self) -> float | None:
        """Return how long ago the work was saved; None = never."""
        return None if self._checkpoint_at is None else time.monotonic() - self._checkpoint_at
