"""Banks grouped by what placement sees of them, so that equal banks are judged once, however many there are.

A *shape* is the kind of a bank, the free shares of its devices, and the CPU and memory that its node has
left. A fleet of ten thousand nodes has some hundred or thousand shapes. Each shape knows its least loaded
bank. Numbers of shapes that have had no bank for a while are used again; two logs tell a keeper of costs
which numbers have a new meaning, and which have banks again. The next step is `placement.Placer`.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np

from airflow_gpu_provider.broker.capacity import Capacity
from airflow_gpu_provider.broker.domains import free_domains, harm, links_of
from airflow_gpu_provider.broker.layout import FloatArray, IntArray
from airflow_gpu_provider.broker.model import WHOLE_DEVICE, GpuRequest

#: Kind, size, milli-cores, MiB, then the free shares, the largest last; and the free devices of each NVLink
#: domain, nothing where no device of the fleet has links.
_Key: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

_NOBODY = np.inf
#: Entries of a log before it starts anew.
_LOG = 100_000


class Shapes:
    """The shapes (G) of a capacity's banks. Call `follow` before reading."""

    def __init__(self, capacity: Capacity) -> None:
        layout = capacity.layout
        banks = len(layout.banks)
        self._capacity = capacity
        self._sizes: list[int] = layout.exists.sum(axis=1).tolist()
        is_linked = any(device.nvlink for bank in layout.banks for device in bank)
        self._links = [links_of(bank) for bank in layout.banks] if is_linked else None
        self._number_of: dict[_Key, int] = {}
        self._keys: list[_Key] = []
        self._members: list[list[tuple[float, int]]] = []  # heaps of (load, bank), with banks that left
        self._count: list[int] = []
        self._empty: dict[int, None] = {}  # shapes without a bank, the longest so first
        self._shape: list[int] = [-1] * banks
        self._load: list[float] = [0.0] * banks
        #: the same two for those who read many at once [B]
        self.of_bank: IntArray = np.full(banks, -1, np.int64)
        self.load_of_bank: FloatArray = np.zeros(banks)
        #: grows when the logs start anew: what was kept is void then
        self.generation = 0
        self.renamed: list[int] = []  #: log of numbers that got a new meaning
        self.revived: list[int] = []  #: log of numbers that have a bank (again)
        self.number = 0  #: of numbers in use; the arrays are longer
        room = 256
        self.load: FloatArray = np.full(room, _NOBODY)  #: [G] of the least loaded bank; infinite = no bank
        self.absent: FloatArray = np.full(room, _NOBODY)  #: [G] 0 = has a bank, infinite = has none
        self.kind: IntArray = np.zeros(room, np.int64)
        self.cpu: IntArray = np.zeros(room, np.int64)
        self.memory: IntArray = np.zeros(room, np.int64)
        self.milli: IntArray = np.zeros((room, layout.width), np.int64)
        self.follow()

    def follow(self) -> None:
        """Take over what changed since the last call."""
        changed = self._capacity.changed
        if not changed:
            return
        for node in sorted(changed):
            self._look_at(node)
        changed.clear()
        if len(self.revived) > _LOG:
            self.generation += 1
            self.renamed.clear()
            self.revived.clear()

    def alive(self) -> IntArray:
        """Return the numbers of the shapes that have a bank."""
        return np.flatnonzero(self.absent[: self.number] == 0)

    def least_loaded(self, shape: int) -> int:
        """Return the bank of a shape whose node has the least load."""
        return self._members[shape][0][1]

    def harm(self, shapes: IntArray, request: GpuRequest) -> IntArray | None:
        """Return how a gang and the NVLink domains of each of these shapes suit each other, 0 = best.

        None where that decides nothing: no links are known, or the request is no gang of whole devices.
        """
        if self._links is None or request.gpus < 2 or request.is_shared:
            return None
        return np.array([harm(self._keys[shape][1], request.gpus) for shape in shapes.tolist()], np.int64)

    def count(self) -> IntArray:
        """Return the number of banks of each shape."""
        return np.array(self._count, np.int64)

    def _look_at(self, node: int) -> None:
        capacity, layout = self._capacity, self._capacity.layout
        host = (int(capacity.cpu[node]), int(capacity.memory[node]))
        measured = float(layout.load[node])
        for bank in range(layout.first_bank[node], layout.first_bank[node + 1]):
            shares, size = capacity.milli[bank].tolist(), self._sizes[bank]
            load = measured if measured == measured else 1.0 - sum(shares) / (size * WHOLE_DEVICE)
            free: tuple[int, ...] = ()
            if self._links is not None:
                free = free_domains(self._links[bank], [share == WHOLE_DEVICE for share in shares])
            shares.sort()
            key = ((int(layout.kind_of[bank]), size, *host, *shares), free)
            shape = self._number_of.get(key)
            if shape is None:
                shape = self._name(key)
            if shape != self._shape[bank] or load != self._load[bank]:
                self._move(bank, shape, load)

    def _move(self, bank: int, shape: int, load: float) -> None:
        before = self._shape[bank]
        self._shape[bank] = self.of_bank[bank] = shape
        self._load[bank] = self.load_of_bank[bank] = load
        if self._count[shape] == 0:
            self._empty.pop(shape, None)
            self.absent[shape] = 0.0
            self.revived.append(shape)
        self._count[shape] += 1
        heappush(self._members[shape], (load, bank))
        self._tidy(shape)
        if before >= 0:
            self._count[before] -= 1
            if self._count[before] == 0:
                self._empty[before] = None
                self.absent[before] = _NOBODY
            self._tidy(before)

    def _tidy(self, shape: int) -> None:
        """Drop banks that left, so that the first of the heap is true."""
        members = self._members[shape]
        if len(members) > 2 * self._count[shape] + 8:
            members[:] = sorted({each for each in members if self._is_true(shape, each)})
        while members and not self._is_true(shape, members[0]):
            heappop(members)
        self.load[shape] = members[0][0] if members else _NOBODY

    def _is_true(self, shape: int, member: tuple[float, int]) -> bool:
        load, bank = member
        return self._shape[bank] == shape and self._load[bank] == load

    def _name(self, key: _Key) -> int:
        """Return the number of a new shape: one that is long without banks, or a new one."""
        if len(self._empty) > self.number // 2 + 128:
            shape = next(iter(self._empty))
            del self._empty[shape], self._number_of[self._keys[shape]]
            self._keys[shape] = key
        else:
            shape = self.number
            if shape == len(self.load):
                self._grow()
            self._keys.append(key)
            self._members.append([])
            self._count.append(0)
            self.number += 1
        self.renamed.append(shape)
        self._number_of[key] = shape
        self.kind[shape], _, self.cpu[shape], self.memory[shape] = key[0][:4]
        self.milli[shape] = key[0][4:]
        return shape

    def _grow(self) -> None:
        more = len(self.load)
        nobody = np.full(more, _NOBODY)
        zeros = np.zeros(more, np.int64)
        self.load, self.absent = np.append(self.load, nobody), np.append(self.absent, nobody)
        self.kind, self.cpu = np.append(self.kind, zeros), np.append(self.cpu, zeros)
        self.memory = np.append(self.memory, zeros)
        self.milli = np.concatenate([self.milli, np.zeros_like(self.milli)])
