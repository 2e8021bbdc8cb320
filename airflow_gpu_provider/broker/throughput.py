"""Learn from finished runs how fast each GPU model really is for each kind of work.

TFLOPS order models roughly; what a task class reaches on a model is measured. A speed here is on the scale of
the ratings (A100 = 35): what was measured of a class fixes the ratios between models, the ratings fix the
scale, so that measured and unmeasured models, and a task's ``min_tflops``, stay comparable. Few runs weigh
little, the median of recent ones ignores outliers, old runs fade. The next step is `matching.candidates`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import numpy as np

from airflow_gpu_provider.broker.flavors import FLAVORS, Flavor, canonical_model, tflops
from airflow_gpu_provider.broker.layout import FloatArray


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a finished run reached: units of work a second and device, in any unit that its class keeps to."""

    task_class: str
    model: str
    units_per_s: float
    at: datetime


@dataclass(frozen=True, slots=True)
class ThroughputPolicy:
    """How much must be seen before it counts."""

    least_runs: int = 3  #: fewer runs of a class on a model say nothing, nor do those faded to half as many
    strength: float = 3.0  #: runs after which the measurement weighs as much as the rating
    half_life: timedelta = timedelta(days=30)
    kept_runs: int = 64  #: of each class and model, the newest


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of a class by model, on the scale of the ratings; empty = nothing is known."""

    by_model: Mapping[str, float] = field(default_factory=dict)
    rated: Mapping[str, float] = field(default_factory=dict)  #: of whole devices of these models, where known

    def of(self, model: str, rating: float) -> float:
        """Return the measured speed of a model, or its rating; a slice has its part of it."""
        name = canonical_model(model)
        speed, whole = self.by_model.get(name), self.rated.get(name, 0.0)
        if speed is None:
            return rating
        return speed * (rating / whole) if rating > 0 and whole > 0 else speed


UNKNOWN = Speeds()


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a class on a model."""

    task_class: str
    model: str
    runs: int
    units_per_s: float  #: of each device, the median
    rating: float | None
    speed: float | None  #: on the scale of the ratings; None = it does not count yet
    why_not: str | None  #: None = it counts


class ThroughputTable:
    """Runs by class and model. Order changes nothing, but for which are too old to keep."""

    def __init__(
        self,
        runs: Iterable[Throughput] = (),
        policy: ThroughputPolicy | None = None,
        flavors: Mapping[str, Flavor] = FLAVORS,
    ) -> None:
        self._policy = policy or ThroughputPolicy()
        self._flavors = flavors
        self._runs: dict[str, dict[str, deque[Throughput]]] = {}
        for run in sorted(runs, key=lambda run: run.at):
            self.add(run)

    def add(self, run: Throughput) -> None:
        """Count a finished run; a speed that is not above 0 is refused."""
        if not (run.units_per_s > 0 and math.isfinite(run.units_per_s)):
            raise ValueError(
                f"{run.units_per_s} units/s of {run.task_class} on {run.model}: a measured run did some work"
            )
        of_class = self._runs.setdefault(run.task_class, {})
        kept = of_class.setdefault(canonical_model(run.model), deque(maxlen=self._policy.kept_runs))
        kept.append(run)

    def learned(self, now: datetime) -> dict[str, Speeds]:
        """Return the speeds of every class of which enough is known."""
        found = {each: self.speeds(each, now) for each in sorted(self._runs)}
        return {each: speeds for each, speeds in found.items() if speeds.by_model}

    def speeds(self, task_class: str | None, now: datetime) -> Speeds:
        """Return the speeds of a class. One model alone says nothing of others: it keeps its rating."""
        if task_class is None:
            return UNKNOWN
        least = self._policy.least_runs
        measured = {
            model: (self._weight(runs, now), self._median_log(runs, now))
            for model, runs in self._runs.get(task_class, {}).items()
            if len(runs) >= least and self._weight(runs, now) >= least / 2
        }
        if len(measured) < 2:
            return UNKNOWN
        return Speeds(self._on_rating_scale(measured), {m: tflops(m, self._flavors) for m in measured})

    def measured(self, now: datetime) -> Iterator[Measured]:
        """Yield what is known of every class and model, whether it counts or not."""
        for task_class in sorted(self._runs):
            speeds = self.speeds(task_class, now)
            for model, runs in sorted(self._runs[task_class].items()):
                rating = tflops(model, self._flavors)
                yield Measured(
                    task_class=task_class,
                    model=model,
                    runs=len(runs),
                    units_per_s=math.exp(self._median_log(runs, now)),
                    rating=rating if rating > 0 else None,
                    speed=speeds.by_model.get(model),
                    why_not=self._why_not(model, runs, speeds, now),
                )

    def _why_not(self, model: str, runs: deque[Throughput], speeds: Speeds, now: datetime) -> str | None:
        least = self._policy.least_runs
        if model in speeds.by_model:
            return None
        if len(runs) < least:
            return f"{len(runs)} run(s), {least} are needed"
        if self._weight(runs, now) < least / 2:
            return "its runs are too old"
        return "no other model has enough runs of this class to compare with"

    def _on_rating_scale(self, measured: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        rated = {m: tflops(m, self._flavors) for m in measured}
        known = [m for m in measured if rated[m] > 0]
        if not known:
            # None of the models has a rating: the scale is free, the slowest becomes 1.
            slowest = min(log for _, log in measured.values())
            return {m: math.exp(log - slowest) for m, (_, log) in measured.items()}
        trust = {m: measured[m][0] / (measured[m][0] + self._policy.strength) for m in measured}
        # Units a second become TFLOPS by the factor on which the rated models agree best.
        factor = sum(trust[m] * (math.log(rated[m]) - measured[m][1]) for m in known)
        factor /= sum(trust[m] for m in known)
        speeds = {}
        for model, (_, log) in measured.items():
            seen = log + factor
            prior = math.log(rated[model]) if rated[model] > 0 else seen
            speeds[model] = math.exp(trust[model] * seen + (1 - trust[model]) * prior)
        return speeds

    def _weights(self, runs: Iterable[Throughput], now: datetime) -> FloatArray:
        ages = np.array([max(0.0, (now - run.at) / self._policy.half_life) for run in runs], np.float64)
        weights: FloatArray = 0.5**ages
        return weights

    def _weight(self, runs: deque[Throughput], now: datetime) -> float:
        return float(self._weights(runs, now).sum())

    def _median_log(self, runs: deque[Throughput], now: datetime) -> float:
        """Return the weighted median of the logarithms; halfway where it lies between two."""
        logs = np.log([run.units_per_s for run in runs])
        order = np.argsort(logs, kind="stable")
        reached = np.cumsum(self._weights(runs, now)[order])
        half = reached[-1] / 2
        low = logs[order][np.searchsorted(reached, half * (1 - 1e-9))]
        high = logs[order][min(len(logs) - 1, np.searchsorted(reached, half * (1 + 1e-9)))]
        return float((low + high) / 2)
