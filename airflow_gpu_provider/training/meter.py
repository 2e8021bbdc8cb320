"""Counts what a shard does, at the cost of a few clock readings for each synchronisation.

On a GPU the marks are CUDA events on the current stream, read when they have passed: nothing here ever waits
for the device, and the times are the device's own, however far the host runs ahead. The main thread counts;
the threads that tell (`telemetry`, `pulse`) read. Next: `pace` compares the shards.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from airflow_gpu_provider.training.pace import Counters

Mark = float | torch.cuda.Event


class Clock(Protocol):
    """Marks points in the order of the work."""

    def mark(self) -> Mark:
        """Return this point."""

    def between(self, begin: Mark, end: Mark) -> float | None:
        """Return the seconds from one mark to another, None while the work has not got there."""


class HostClock:
    """For work that is done when the call returns."""

    def mark(self) -> Mark:
        """Return this moment."""
        return time.monotonic()

    def between(self, begin: Mark, end: Mark) -> float | None:
        """Return the difference."""
        return end - begin  # type: ignore[operator]


class DeviceClock:
    """For work that is queued on a CUDA stream."""

    def mark(self) -> Mark:
        """Queue an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, begin: Mark, end: Mark) -> float | None:
        """Return the device's time between two events, None while the later one has not passed."""
        assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        if not end.query():  # type: ignore[no-untyped-call]
            return None
        return float(begin.elapsed_time(end)) / 1000


@dataclass
class _Window:
    """From one synchronisation to the end of the next."""

    began: Mark
    arrived: Mark | None = None
    collectives: list[tuple[Mark, Mark]] = field(default_factory=list)
    size_bytes: int = 0
    ended: Mark | None = None
    steps: int = 0


class Meter:
    """One shard's counters."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._window = _Window(clock.mark())
        self._pending: deque[_Window] = deque()
        #: replaced, never changed, and each by one thread only: others read them
        self._done = Counters()
        self._seen: tuple[float | None, float | None] = (None, None)

    @classmethod
    def on(cls, device: torch.device) -> Meter:
        """Return a meter for work on a device."""
        return cls(DeviceClock() if device.type == "cuda" else HostClock())

    @property
    def counters(self) -> Counters:
        """Everything so far."""
        loss, gradient_norm = self._seen
        return self._done.model_copy(update={"loss": loss, "gradient_norm": gradient_norm})

    def begin(self) -> None:
        """Begin a window now: what came before (joining, saving) is nobody's step."""
        self._window = _Window(self._clock.mark())

    def arrive(self) -> None:
        """Note that the shard's own work is done and sharing begins; the first one of a window counts."""
        if self._window.arrived is None:
            self._window.arrived = self._clock.mark()

    @contextmanager
    def collective(self, size_bytes: int) -> Iterator[None]:
        """Time a collective."""
        self.arrive()
        began = self._clock.mark()
        yield
        self._window.collectives.append((began, self._clock.mark()))
        self._window.size_bytes += size_bytes

    def end(self, steps: int) -> None:
        """End a window of so many steps whose results were shared, and begin the next."""
        window = self._window
        window.steps, window.ended = steps, self._clock.mark()
        self._pending.append(window)
        self._window = _Window(window.ended)
        while self._pending and self._count(self._pending[0]):
            self._pending.popleft()

    def add_samples(self, count: int) -> None:
        """Count what the author says he has trained on."""
        self._done = self._done.model_copy(update={"samples": (self._done.samples or 0) + count})

    def read(self, *, loss: float | None, gradient_norm: float | None) -> None:
        """Keep the newest values that were read from the device."""
        self._seen = (loss, gradient_norm)

    def _count(self, window: _Window) -> bool:
        assert window.ended is not None
        total = self._clock.between(window.began, window.ended)
        if total is None:
            return False
        times = [self._clock.between(*pair) or 0.0 for pair in window.collectives]
        shared = 0.0
        if window.arrived is not None:
            last = window.collectives[-1][1] if window.collectives else window.ended
            shared = self._clock.between(window.arrived, last) or 0.0
        now = self._done
        self._done = now.model_copy(
            update={
                "steps": now.steps + window.steps,
                "own_s": now.own_s + total - shared,
                "shared_s": now.shared_s + shared,
                "collectives": now.collectives + len(times),
                "collective_s": now.collective_s + sum(times),
                "size_bytes": now.size_bytes + window.size_bytes,
            }
        )
        return True
