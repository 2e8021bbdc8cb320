"""What becomes free when, in the order of time: what ends of leases and of bookings give back.

Kept sorted, so that what is free at a moment is what is free now and the rows up to there. The next step is
`forecast.Forecast`, which looks for the first moment at which a claim fits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np

from airflow_gpu_provider.broker.capacity import Capacity, Part
from airflow_gpu_provider.broker.layout import FloatArray, IntArray


class Releases:
    """Parts by the second in which they end."""

    def __init__(self, endings: Iterable[tuple[float, Part]]) -> None:
        found = sorted(endings, key=lambda each: each[0])
        #: the moments at which something changes, now first of those to come
        self.times: list[float] = sorted([0.0, *(seconds for seconds, _ in found)])
        self._devices = _Rows(found, lambda part: part.devices)
        self._nodes = _Rows(found, _needs)

    def add(self, seconds: float, part: Part) -> None:
        """Note that a part ends then."""
        self.times.insert(bisect_right(self.times, seconds), seconds)
        self._devices.add(seconds, part.devices)
        self._nodes.add(seconds, _needs(part))

    def until(self, seconds: float, free: Capacity) -> Capacity:
        """Return what is free then, of what is ``free`` now."""
        then = free.copy()
        device, node = self._devices.until(seconds), self._nodes.until(seconds)
        np.add.at(then.milli, (device[:, 0], device[:, 1]), device[:, 2])
        if len(node):
            np.add.at(then.cpu, node[:, 0], node[:, 1])
            np.add.at(then.memory, node[:, 0], node[:, 2])
        return then


def _needs(part: Part) -> list[tuple[int, int, int]]:
    """Return the nodes of which a part takes CPU or memory: most leases take devices alone."""
    return [row for row in part.nodes if row[1] or row[2]]


class _Rows:
    """Rows of parts, sorted by the second in which they end."""

    def __init__(
        self,
        endings: Sequence[tuple[float, Part]],
        rows_of: Callable[[Part], Sequence[tuple[int, int, int]]],
    ) -> None:
        parts = [rows_of(part) for _, part in endings]
        sizes = [len(rows) for rows in parts]
        self._at: FloatArray = np.repeat(np.array([seconds for seconds, _ in endings], np.float64), sizes)
        flat = np.fromiter(chain.from_iterable(chain.from_iterable(parts)), np.int64, 3 * sum(sizes))
        self._rows: IntArray = flat.reshape(-1, 3)

    def add(self, seconds: float, rows: Sequence[tuple[int, int, int]]) -> None:
        if not rows:
            return
        place = int(np.searchsorted(self._at, seconds, side="right"))
        new = np.array(rows, np.int64)
        self._at = np.concatenate((self._at[:place], np.full(len(rows), seconds), self._at[place:]))
        self._rows = np.concatenate((self._rows[:place], new, self._rows[place:]))

    def until(self, seconds: float) -> IntArray:
        found: IntArray = self._rows[: int(np.searchsorted(self._at, seconds, side="right"))]
        return found
