"""Sleep until a child ends, a signal asks for something, or the time is over.

A supervisor that looked often enough to notice a death at once would spend most of its time on looking. The
kernel tells it instead, through the pipe that Python writes signals to. Main thread only.
"""

from __future__ import annotations

import os
import select
import signal
import time

#: what one cause ends together is met together, as one change
_TOGETHER_S = 0.02


class Wakeup:
    """One process's way to be woken; make it once."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        for end in (self._read, write):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # Python tells only of signals that have a handler
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def sleep(self, seconds: float) -> None:
        """Return after ``seconds``, or a moment after there is something to look at."""
        ready, _, _ = select.select([self._read], [], [], max(0.0, seconds))
        if ready:
            time.sleep(_TOGETHER_S)
            os.read(self._read, 4096)
