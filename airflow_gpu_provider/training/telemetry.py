"""A shard's measurements: gathered in memory, appended to its own JSON lines file twice a second.

The author's tensors are kept as they are and read when they are written, because reading one of a GPU waits
for the GPU; an event says when its value is there, since another thread's stream knows nothing of that. After
a fault steps are done again: a reader keeps the last line of each (shard, step). Next: whoever exports
metrics reads them with `measurements`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from pydantic import JsonValue

from airflow_gpu_provider.training.gauge import Gauge
from airflow_gpu_provider.training.line_file import LineFile, keep_newest_files
from airflow_gpu_provider.training.meter import Meter
from airflow_gpu_provider.training.process_gauge import ProcessGauge

log = logging.getLogger(__name__)

Number = float | int | torch.Tensor

_FLUSH_S = 0.5
#: lines of fast loops are thinned to this distance; a synchronisation is always written
_REPORT_EVERY_S = 0.5
_GAUGE_EVERY_S = 1.0
#: how many files a run keeps, whatever the number of processes that it has lost
_LEAST_FILES = 64
_CPU = torch.device("cpu")


class Telemetry:
    """Append-only writer of one process."""

    def __init__(self, path: Path, uid: str, *, device: torch.device = _CPU, shards: int = 1) -> None:
        self._file = LineFile(path)
        self._uid = uid
        self.meter = Meter.on(device)
        self._gauge = Gauge(self.meter, ProcessGauge(_uuid_of(device)), shards=shards)
        self._gauged_at = time.monotonic()
        self._place: tuple[int, int] | None = None  #: shard and step that were reported last
        keep_newest_files(path.parent, max(_LEAST_FILES, 4 * shards))
        self._lines: deque[dict[str, str | float | _Kept]] = deque()
        self._write_lock = threading.Lock()
        self._last_report_at = 0.0
        threading.Thread(target=self._flush_for_ever, name="telemetry", daemon=True).start()

    def report(self, shard: int, step: int, values: Mapping[str, Number]) -> None:
        """Keep what the author reported of a step, unless the line before is very young."""
        now = time.monotonic()
        self._place = (shard, step)
        if step > 0 and now - self._last_report_at < _REPORT_EVERY_S:
            return
        self._last_report_at = now
        self.event("report", shard=shard, step=step, **values)

    def event(self, kind: str, **values: str | Number) -> None:
        """Keep one line."""
        line: dict[str, str | float | _Kept] = {"at": time.time(), "kind": kind, "uid": self._uid}
        for name, value in values.items():
            line[name] = _Kept(value) if isinstance(value, torch.Tensor) else value
        self._lines.append(line)

    def flush(self) -> None:
        """Write what there is, once more before the end. A full disk does not end training."""
        try:
            self._write()
        except OSError as error:
            log.warning("Measurements cannot be written to %s: %s; training goes on", self._file.path, error)

    def _write(self) -> None:
        with self._write_lock:
            lines: list[dict[str, JsonValue]] = []
            while self._lines:
                line = self._lines.popleft()
                lines.append({key: _plain(value) for key, value in line.items()})
            for plain in lines:
                self._gauge.look_at(plain)
            if time.monotonic() - self._gauged_at >= _GAUGE_EVERY_S and self._place is not None:
                self._gauged_at = time.monotonic()
                shard, step = self._place
                place: dict[str, JsonValue] = {"at": time.time(), "kind": "gauge", "uid": self._uid}
                lines.append({**place, "shard": shard, "step": step, **self._gauge.read()})
            self._file.append(lines)

    def _flush_for_ever(self) -> None:
        while True:
            time.sleep(_FLUSH_S)
            self.flush()


class _Kept:
    """A tensor to read later, in another thread."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._ready: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> float | int:
        """Return the value, as soon as the device has it."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._tensor.item()


def _plain(value: str | float | _Kept) -> str | float | int:
    plain = value.read() if isinstance(value, _Kept) else value
    return str(plain) if isinstance(plain, float) and not math.isfinite(plain) else plain  # JSON has no NaN


def gradient_norm(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return the norm of the gradients that still lie there, for a line that is told anyway."""
    gradients = [
        parameter.grad
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    return {"gradient_norm": torch.nn.utils.get_total_norm(gradients)} if gradients else {}


def _uuid_of(device: torch.device) -> str | None:
    """Return the UUID of the only device that is visible here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    return visible if visible and device.type == "cuda" else None
