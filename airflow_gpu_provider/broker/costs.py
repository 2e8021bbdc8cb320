"""What it costs to put a request on a bank: the sum that `placement.Placer` makes smallest.

Fragmentation and stranded GPU that the placement adds, a small term for packing, and the mismatch of speed;
in milli-GPU. A function of the shape of the bank alone: equal banks cost the same. The scarcity of kinds,
which changes with every placement, is added by the placer. Sums are rounded, so that the order in which they
were computed decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from airflow_gpu_provider.broker.fragmentation import Mix
from airflow_gpu_provider.broker.layout import BoolArray, FloatArray, IntArray, Layout, millicores
from airflow_gpu_provider.broker.matching import degrees, speeds_of
from airflow_gpu_provider.broker.model import WHOLE_DEVICE, GpuRequest
from airflow_gpu_provider.broker.throughput import Speeds

#: Weight of leaving little room on a bank: decides only between placements that else cost the same.
_PACKING = 100.0
#: Weight of speed beyond what was asked, for each milli-GPU: half of what as large a lack would cost.
_SURPLUS = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Banks:
    """What placement sees of some banks (R)."""

    kind: IntArray
    cpu: IntArray
    memory: IntArray
    milli: IntArray  #: [R, W] free shares
    allowed: BoolArray  #: [R, W] devices that the request may use, free or not
    fragments: FloatArray  #: [R] what the mix cannot use of them now


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Of one request class on some banks; infinite where it does not fit."""

    cost: FloatArray  #: [R]
    share: IntArray  #: [R] the free share of the device to use, where a share of one is asked


def is_share(request: GpuRequest) -> bool:
    """Return whether a part of one device is asked: then it matters which one."""
    return request.gpus == 1 and request.is_shared


def mismatch(layout: Layout, request: GpuRequest, speeds: Speeds | None = None) -> FloatArray:
    """Return what being slower or faster than asked costs on each kind [K], measured ``speeds`` first."""
    asked, speed = request.gpus * layout.shares(request), speeds_of(layout.kinds, speeds)
    degree = degrees(speed, request)
    surplus = np.zeros(len(speed))
    if request.min_tflops > 0:
        faster = np.maximum(speed - request.min_tflops, 0.0)
        surplus = np.divide(faster, speed, out=surplus, where=speed > 0)
    found: FloatArray = asked * ((1.0 - degree) + _SURPLUS * surplus)
    return found


class CostFunction:
    """The cost of requests on the banks of one layout, against one mix of requests."""

    def __init__(self, layout: Layout, mix: Mix) -> None:
        self.mix = mix
        self._most_cpu = max(1, int(layout.cpu.max(initial=0)))
        self._most_milli = layout.width * WHOLE_DEVICE

    def __call__(self, request: GpuRequest, shares: IntArray, by_kind: FloatArray, banks: Banks) -> Costs:
        """Return the costs; ``by_kind`` is what the request costs on each kind whatever the state.

        ``shares`` [K] is what each member takes, from `Layout.shares`.
        """
        found = Costs(np.full(len(banks.kind), np.inf), np.zeros(len(banks.kind), np.int64))
        takes = shares[banks.kind]
        free = banks.allowed & (banks.milli >= takes[:, None])
        fits = free.sum(axis=1) >= request.gpus
        fits &= (banks.cpu >= millicores(request.cpu_cores)) & (banks.memory >= request.host_memory_mib)
        bank = np.flatnonzero(fits)
        if not len(bank):
            return found
        choose = _each_share if is_share(request) else _tightest
        row, share, after = choose(banks.milli[bank], free[bank], takes[bank], request.gpus)
        row = bank[row]
        cost = self._sum(request, banks, row, after, takes[row]) + by_kind[banks.kind[row]]
        cost = np.round(cost, 6)
        # The best of a bank is written last; of equal ones the fullest, which leaves whole devices free.
        order = np.argsort(cost, kind="stable")[::-1]
        found.cost[row[order]] = cost[order]
        found.share[row[order]] = share[order]
        return found

    def _sum(
        self, request: GpuRequest, banks: Banks, row: IntArray, after: IntArray, takes: IntArray
    ) -> FloatArray:
        mix, kind = self.mix, banks.kind[row]
        cpu, memory, milli = banks.cpu[row], banks.memory[row], banks.milli[row].sum(axis=1)
        cpu_after = cpu - millicores(request.cpu_cores)
        milli_after = milli - request.gpus * takes
        growth = mix.fragments(kind, cpu_after, after) - banks.fragments[row]
        stranded_after = mix.stranded(cpu_after, memory - request.host_memory_mib, milli_after)
        growth += stranded_after - mix.stranded(cpu, memory, milli)
        left = cpu_after / self._most_cpu + milli_after / self._most_milli
        cost: FloatArray = growth + _PACKING * left
        return cost


def _each_share(
    milli: IntArray, free: BoolArray, takes: IntArray, _gpus: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return (row, share, milli after) for one device of each distinct free share of each bank."""
    first = free.copy()
    for slot in range(1, milli.shape[1]):
        first[:, slot] &= ((milli[:, :slot] != milli[:, slot : slot + 1]) | ~free[:, :slot]).all(axis=1)
    row, slot_of = np.nonzero(first)
    after = milli[row]
    share = after[np.arange(len(row)), slot_of]
    after[np.arange(len(row)), slot_of] -= takes[row]
    return row, share, after


def _tightest(
    milli: IntArray, free: BoolArray, takes: IntArray, gpus: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return (row, share, milli after) with the devices of the least free share taken on each bank."""
    order = np.argsort(np.where(free, milli, np.iinfo(np.int64).max), axis=1, kind="stable")
    after = milli.copy()
    taken = order[:, :gpus]
    left = np.take_along_axis(milli, taken, axis=1) - takes[:, None]
    np.put_along_axis(after, taken, left, axis=1)
    return np.arange(len(milli)), np.zeros(len(milli), np.int64), after
