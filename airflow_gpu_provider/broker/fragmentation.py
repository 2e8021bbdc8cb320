"""What a placement costs the requests that come after it, in milli-GPU.

*Fragmentation* (FGD, ATC'23): free GPU on a bank that a request of the recent mix cannot use, expected over
the mix. *Stranded* GPU: free GPU that the node's remaining CPU and memory cannot feed at the mix's average
need. *Pressure* of a kind: demand of the requests that accept only some kinds, over their capacity, so that
flexible requests leave scarce models to those who need them. The mix must be fresh: a stale one costs more
than it saves. The next step is `placement.Placer`, which adds these up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from airflow_gpu_provider.broker.layout import (
    BoolArray,
    FloatArray,
    IntArray,
    Layout,
    millicores,
    usual_share,
)
from airflow_gpu_provider.broker.matching import accepts
from airflow_gpu_provider.broker.model import WHOLE_DEVICE, GpuRequest

#: How far scarcity follows what is free of a kind, and its limit. With more weight, more choosy claims are
#: served until demand reaches the fleet's size, and less of the fleet is used when demand is far beyond it.
_FOLLOWS, _MOST_SCARCE = 0.5, 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    """Classes (C) of recent requests, weighed by how often they came. Build it with `Mix.of`."""

    weight: FloatArray  #: [C], sums to 1
    cpu: IntArray  #: [C] milli-cores of the part that fits a bank
    gpus: IntArray  #: [C]
    milli: IntArray  #: [S, K] distinct shares asked of each kind
    share: IntArray  #: [C] index into ``milli``
    suits: BoolArray  #: [C, K]
    pressure: FloatArray  #: [K] on an empty fleet
    size: FloatArray  #: [K] milli-GPU of each kind
    cpu_per_gpu: float  #: milli-cores for each milli-GPU, 0 = nobody asks for cores
    memory_per_gpu: float  #: MiB for each milli-GPU

    @classmethod
    def of(cls, layout: Layout, requests: Iterable[GpuRequest] | Mapping[GpuRequest, int]) -> Mix:
        """Return the mix of ``requests``, one by one or counted; those without GPUs ask for nothing here."""
        sizes = _largest_banks(layout)
        rows: Counter[tuple[int, int, tuple[int, ...], tuple[bool, ...], int]] = Counter()
        demand = cpu = memory = 0
        for request, times in Counter(requests).items():
            if request.gpus < 1:
                continue
            suits = tuple(
                accepts(request, model=kind.model, memory_mib=kind.memory_mib, tflops=kind.tflops)
                for kind in layout.kinds
            )
            usual = usual_share(layout.kinds, request)
            demand += times * request.gpus * usual
            cpu += times * millicores(request.cpu_cores)
            memory += times * request.host_memory_mib
            # A gang wider than every bank fills whole banks: as a class of its own it would fit nowhere.
            widest = max((size for size, suit in zip(sizes, suits, strict=True) if suit), default=1)
            gpus = min(request.gpus, widest)
            shares = tuple(request.milli_on(kind.memory_mib) for kind in layout.kinds)
            cores = millicores(request.cpu_cores) * gpus // request.gpus
            rows[(cores, gpus, shares, suits, usual)] += times
        keys = sorted(rows)
        total = sum(rows.values())
        distinct = {shares: number for number, shares in enumerate(sorted({key[2] for key in keys}))}
        suits_of = np.array([key[3] for key in keys], np.bool_).reshape(len(keys), len(layout.kinds))
        weights = np.array([rows[key] / total for key in keys], np.float64)
        per_class = np.array([rows[key] * key[1] * key[4] for key in keys], np.float64)
        devices = np.bincount(layout.kind_of, layout.exists.sum(axis=1), minlength=len(layout.kinds))
        size: FloatArray = devices.astype(np.float64) * WHOLE_DEVICE
        return cls(
            weight=weights,
            cpu=np.array([key[0] for key in keys], np.int64),
            gpus=np.array([key[1] for key in keys], np.int64),
            milli=np.array(list(distinct), np.int64).reshape(len(distinct), len(layout.kinds)),
            share=np.array([distinct[key[2]] for key in keys], np.int64),
            suits=suits_of,
            pressure=_pressure(size, suits_of, per_class),
            size=size,
            cpu_per_gpu=cpu / demand if demand else 0.0,
            memory_per_gpu=memory / demand if demand else 0.0,
        )

    def scarcity(self, free_of_kind: Sequence[int]) -> FloatArray:
        """Return the pressure on each kind by what is free now, in milli-GPU for each milli-GPU.

        A kind that is fuller than the fleet is scarcer than the mix alone says, an emptier one less so.
        """
        free = np.array(free_of_kind, np.float64)
        size = np.maximum(1.0, self.size)
        left = max(0.01, free.sum() / size.sum())
        fuller = left / np.maximum(0.01, free / size)
        found: FloatArray = self.pressure * fuller**_FOLLOWS
        return np.minimum(found, _MOST_SCARCE)

    def fragments(self, kind: IntArray, cpu: IntArray, milli: IntArray) -> FloatArray:
        """Return the milli-GPU that the mix cannot use; ``kind`` and ``cpu`` are [R], ``milli`` is [R, W]."""
        fits = milli[:, None, :] >= self.milli[:, kind].T[:, :, None]
        small = np.where(fits, 0, milli[:, None, :]).sum(axis=2)[:, self.share]
        usable = (cpu[:, None] >= self.cpu) & (fits.sum(axis=2)[:, self.share] >= self.gpus)
        usable &= self.suits[:, kind].T
        found: FloatArray = np.where(usable, small, milli.sum(axis=1)[:, None]) @ self.weight
        return found

    def stranded(self, cpu: IntArray, memory: IntArray, milli: IntArray) -> FloatArray:
        """Return the free milli-GPU [R] beyond what free CPU and memory can feed; ``milli`` is summed."""
        fed = np.full(len(milli), np.inf)
        if self.cpu_per_gpu > 0:
            fed = np.minimum(fed, cpu / self.cpu_per_gpu)
        if self.memory_per_gpu > 0:
            fed = np.minimum(fed, memory / self.memory_per_gpu)
        beyond: FloatArray = np.maximum(milli - fed, 0.0)
        return beyond


def _largest_banks(layout: Layout) -> list[int]:
    sizes = layout.exists.sum(axis=1)
    return [int(sizes[layout.kind_of == kind].max()) for kind in range(len(layout.kinds))]


def _pressure(size: FloatArray, suits: BoolArray, demand: FloatArray) -> FloatArray:
    choosy = suits.any(axis=1) & ~suits.all(axis=1)
    if not choosy.any():
        return np.zeros(len(size))
    # The demand of each choosy class spreads over the kinds it accepts, scaled to a fleet in full use.
    per_milli = demand[choosy] / (suits[choosy] @ size) * (size.sum() / demand.sum())
    pressure: FloatArray = per_milli @ suits[choosy]
    return pressure
