"""A supervisor that was asked to stop: by whom, and until when its shards may save.

The first signal counts; what comes later changes nothing. Used by `supervisor`.
"""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Nothing until a signal arrives."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.is_orphaned = False  #: whoever started the run is gone
        self.deadline: float | None = None  #: by the monotonic clock, set when the stop begins

    def listen(self) -> None:
        """Take the signals that ask this process to stop."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    @property
    def is_asked(self) -> bool:
        """True once a signal has arrived."""
        return self.reason is not None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.reason is None:
            self.is_orphaned = number == signal.SIGHUP
            asked = f"asked by {signal.Signals(number).name}"
            self.reason = "the process that started the run is gone" if self.is_orphaned else asked
