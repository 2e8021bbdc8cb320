"""What a task that waits for devices tells in its log: changes, and else that it still waits.

A claim may wait for days and is looked at every 20 s. Its place and its reason are told when they are others;
the expected start moves with the clock, so that is no change. Used by `leased`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow.sdk.types import Logger

    from airflow_gpu_provider.wire import ClaimView

_FIRST_S = 40.0
_LONGEST_S = 300.0


class WaitingLog:
    """Tells one wait."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._told: tuple[int | None, str | None] | None = None
        self._told_at = 0.0
        self._pause_s = _FIRST_S

    def tell(self, view: ClaimView, *, now: float | None = None) -> None:
        """Tell how a claim waits, unless that was told not long ago."""
        now = time.monotonic() if now is None else now
        words = (view.position, view.reason)
        if words != self._told:
            self._pause_s = _FIRST_S
        elif now - self._told_at < self._pause_s:
            return
        else:
            self._pause_s = min(2 * self._pause_s, _LONGEST_S)
        self._told, self._told_at = words, now
        self._log.info(
            "Claim %s waits: position %s, expected start %s; %s",
            view.claim_id,
            view.position or "not yet known",
            "unknown" if view.starts_in_s is None else f"in {view.starts_in_s:.0f} s",
            view.reason or "not yet looked at",
        )
