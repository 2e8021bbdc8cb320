"""One line a second of what a shard does: its speed, its exchange, its process, its device.

Read by the telemetry thread, never by the one that trains. Unknown is None. The numbers come from `meter` and
`process_gauge`; the newest loss and gradient norm from the lines that are written anyway.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from pydantic import JsonValue

from airflow_gpu_provider.training.meter import Meter
from airflow_gpu_provider.training.pace import between, samples_between
from airflow_gpu_provider.training.process_gauge import ProcessGauge

_MIB = 2**20


class Gauge:
    """What lies between two looks."""

    def __init__(self, meter: Meter, process: ProcessGauge, *, shards: int) -> None:
        self._meter = meter
        self._process = process
        self._shards = shards
        self._before, self._at = meter.counters, time.monotonic()
        self._loss: float | None = None
        self._gradient_norm: float | None = None

    def look_at(self, line: Mapping[str, JsonValue]) -> None:
        """Keep the newest values of a line that is written."""
        loss, norm = line.get("loss"), line.get("gradient_norm")
        self._loss = float(loss) if isinstance(loss, int | float) else self._loss
        self._gradient_norm = float(norm) if isinstance(norm, int | float) else self._gradient_norm
        self._meter.read(loss=self._loss, gradient_norm=self._gradient_norm)

    def read(self) -> dict[str, JsonValue]:
        """Return the numbers since the last call."""
        counters, now = self._meter.counters, time.monotonic()
        before, seconds = self._before, max(now - self._at, 1e-9)
        self._before, self._at = counters, now
        line: dict[str, JsonValue] = {
            "loss": self._loss,
            "gradient_norm": self._gradient_norm,
            "samples_per_s": _rounded(samples_between({0: before}, {0: counters}, seconds), 1),
            **self._process.read(),
        }
        if counters.steps <= before.steps:  # a window that takes longer than this
            return line
        sample = between({0: before}, {0: counters}, seconds=seconds, shards=self._shards)
        bus, collective = sample.bus_bytes_per_s, sample.collective_s
        return {
            **line,
            "steps_per_s": round(sample.steps / seconds, 3),
            "step_ms": round(1000 * sample.own_s[0], 3),
            "waiting_pct": round(100 * sample.waiting[0], 1),
            "allreduce_ms": None if collective is None else round(1000 * collective, 3),
            "bytes_per_s": round(sample.bytes_per_s),
            "bus_mib_per_s": None if bus is None else round(bus / _MIB, 1),
        }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
