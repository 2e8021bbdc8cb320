"""What a placement costs the requests that come after it, in milli-GPU.

*Fragmentation* (FGD, ATC'23): free GPU on a bank that a request of the recent mix cannot use, expected over
the mix; in part also what is left over when such requests fill the bank. *Stranded* GPU: free GPU that the
node's remaining CPU and memory cannot feed at the mix's average need. *Pressure* of a kind: demand of the
requests that accept only some kinds, over their capacity, so that flexible requests leave scarce models to
those who need them; a young mix, which has not met most of these, imagines a few for each kind (Laplace's
rule of succession). It is paid for the larger of the shares of GPU and cores that are taken, as in dominant
resource fairness (NSDI'11). The mix must be fresh: a stale one costs more than it saves. The next step is
`placement.Placer`, which adds these up.
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
_FOLLOWS, _MOST_SCARCE = 0.25, 2.0
#: Requests imagined for each kind that accept no other, and the most that they make of its pressure: no more
#: than what a model of half the speed costs, so that they decide only between models of about one speed.
_IMAGINED, _MOST_IMAGINED = 3.0, 0.5
#: How much of a class's loss on a bank is what it leaves over by filling it, and not what is too small for it
#: at all. Filling alone is worse: a bank is hardly ever filled by one class.
_FILLING = 0.2


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
    gpu_per_core: FloatArray  #: [K] milli-GPU for each milli-core of the nodes of a kind
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
            pressure=_pressure(size, suits_of, per_class, total),
            size=size,
            gpu_per_core=_gpu_per_core(layout, size),
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

    def dearness(self, free_of_kind: Sequence[int], taken: IntArray, cores: int) -> FloatArray:
        """Return what a request pays for scarcity that takes so much GPU [K] and so many milli-cores."""
        return self.scarcity(free_of_kind) * np.maximum(taken, cores * self.gpu_per_core)

    def fragments(self, kind: IntArray, cpu: IntArray, milli: IntArray) -> FloatArray:
        """Return the milli-GPU that the mix cannot use; ``kind`` and ``cpu`` are [R], ``milli`` is [R, W]."""
        share = np.maximum(self.milli[:, kind].T, 1)
        times = milli[:, None, :] // share[:, :, None]
        small = np.where(times > 0, 0, milli[:, None, :]).sum(axis=2)[:, self.share]
        total = milli.sum(axis=1)[:, None]
        fills = self._fills(cpu, times)
        left = total - fills * self.gpus * share[:, self.share]
        unused = (1.0 - _FILLING) * small + _FILLING * left
        usable = (fills > 0) & self.suits[:, kind].T
        found: FloatArray = np.where(usable, unused, total) @ self.weight
        return found

    def _fills(self, cpu: IntArray, times: IntArray) -> IntArray:
        """Return how often each class fits [R, C], when its share fits ``times`` [R, S, W] on each device."""
        # Members of a gang sit on distinct devices.
        gangs = (times > 0).sum(axis=2)[:, self.share] // self.gpus
        fills = np.where(self.gpus > 1, gangs, times.sum(axis=2)[:, self.share])
        fed = np.maximum(cpu, 0)[:, None] // np.maximum(self.cpu, 1)
        found: IntArray = np.where(self.cpu > 0, np.minimum(fills, fed), fills)
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


def _gpu_per_core(layout: Layout, size: FloatArray) -> FloatArray:
    cores = np.bincount(layout.kind_of, layout.cpu[layout.node_of], minlength=len(size))
    found: FloatArray = np.divide(size, cores, out=np.zeros(len(size)), where=cores > 0)
    return found


def _pressure(size: FloatArray, suits: BoolArray, demand: FloatArray, requests: int) -> FloatArray:
    """Return the demand for each kind by those who do not accept all, scaled to a fleet in full use."""
    if not len(size):
        return np.zeros(0)
    each = demand.sum() / requests if requests else float(WHOLE_DEVICE)
    scale = size.sum() / (demand.sum() + _IMAGINED * each * len(size))
    choosy = suits.any(axis=1) & ~suits.all(axis=1)
    # The demand of each choosy class spreads over the kinds it accepts.
    per_milli = demand[choosy] / (suits[choosy] @ size) * scale
    imagined = np.minimum(_IMAGINED * each / np.maximum(1.0, size) * scale, _MOST_IMAGINED)
    # Only what sets kinds apart counts: among kinds of one size nothing is imagined.
    pressure: FloatArray = per_milli @ suits[choosy] + (imagined - imagined.min())
    return pressure
