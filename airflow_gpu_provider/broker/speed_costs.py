"""What a model costs a class of tasks, by the speeds that were measured of it, for each milli-GPU asked.

What the class loses there against its best model, plus the price of the model: what the classes of the
stream would reach on it, times the square of the leased share of the fleet. So those that gain least from a
fast model leave it to others, and on an empty fleet everybody gets his best. A class of which nothing was
measured counts by the ratings, unless its request says what speed it needs: then nothing is gained by more.
The next step is `placement.Placer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from airflow_gpu_provider.broker.layout import FloatArray, Kind, usual_share
from airflow_gpu_provider.broker.matching import speeds_of
from airflow_gpu_provider.broker.model import GpuRequest
from airflow_gpu_provider.broker.throughput import UNKNOWN, Speeds


class SpeedCosts:
    """Losses and prices by kind of device, ready to be added up at each placement."""

    def __init__(self, kinds: Sequence[Kind], learned: Mapping[str, Speeds] | None = None) -> None:
        self._kinds = kinds
        self._learned = learned or {}
        self._reached = {each: _reached(kinds, speeds) for each, speeds in self._learned.items()}
        self._rated = _reached(kinds, UNKNOWN)
        self._price: FloatArray = np.zeros(len(kinds))

    def renew(self, asked: Mapping[GpuRequest, int] | Iterable[GpuRequest]) -> None:
        """Take the prices from these requests, counted or one by one."""
        items = asked.items() if isinstance(asked, Mapping) else ((request, 1) for request in asked)
        weights: dict[str, float] = {}
        rated = 0.0
        for request, times in items:
            weight = float(times * request.gpus * usual_share(self._kinds, request))
            if request.task_class in self._reached:
                weights[request.task_class] = weights.get(request.task_class, 0.0) + weight
            else:
                rated += weight
        total = sum(weights.values()) + rated
        if total > 0:
            self._price = self._rated * (rated / total)
            for each, weight in sorted(weights.items()):
                self._price += self._reached[each] * (weight / total)

    def speeds(self, task_class: str | None) -> Speeds:
        """Return the measured speeds of a class; empty = nothing is known."""
        return UNKNOWN if task_class is None else self._learned.get(task_class, UNKNOWN)

    def of(self, request: GpuRequest, leased: float) -> FloatArray | None:
        """Return the costs [K] of a request while a share of the fleet, 0..1, is leased; None = unknown."""
        reached = None if request.task_class is None else self._reached.get(request.task_class)
        if reached is None:
            if request.min_tflops > 0:
                return None
            reached = self._rated
        costs: FloatArray = leased**2 * self._price - reached
        costs -= costs.min()
        return costs


def _reached(kinds: Sequence[Kind], speeds: Speeds) -> FloatArray:
    """Return what a class reaches on each kind, against its best; where nothing is known it is the best."""
    found = speeds_of(kinds, speeds)
    best = found.max(initial=0.0)
    return np.where(found > 0, found / best, 1.0) if best > 0 else np.ones(len(found))
