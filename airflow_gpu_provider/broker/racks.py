"""Which nodes stand near one another: one rack, then one zone, then by measured latency.

Read from the labels ``rack`` and ``zone`` of the nodes. It decides among sets of nodes that are as few and as
good otherwise, so it makes no gang wait; a fleet without labels and latencies pays nothing for it. A node
without the label where others have it is near to no other. Next step: `spread.Spread`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from airflow_gpu_provider.broker.domains import numbered
from airflow_gpu_provider.broker.model import Node

_IntArray: TypeAlias = npt.NDArray[np.int64]

#: Of nodes that are equal otherwise, so many are compared by latency: bounds the time on a large idle fleet.
_COMPARED = 32


@dataclass(frozen=True, slots=True, eq=False)
class Racks:
    """Where the nodes of a fleet stand; the narrower level first, none where nobody said."""

    levels: tuple[_IntArray, ...] = ()  #: [N] the number of each node's rack, of its zone

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Racks:
        """Return the racks of these nodes. Racks of two zones are two, though their names are one."""
        racks: list[Hashable | None] = [
            None if "rack" not in node.labels else (node.labels.get("zone"), node.labels["rack"])
            for node in nodes
        ]
        zones: list[Hashable | None] = [node.labels.get("zone") for node in nodes]
        return cls(tuple(np.array(numbered(names), np.int64) for names in (racks, zones) if any(names)))

    def together(self, room: _IntArray, members: int) -> _IntArray:
        """Return the room of one rack only, else of one zone, if as few nodes as anywhere have enough there.

        Of several the one with the least room to spare, so that the large ones stay whole.
        """
        if not self.levels:
            return room
        sums = np.cumsum(np.sort(room)[::-1])
        fewest = int(np.searchsorted(sums, members)) + 1
        for level in self.levels:
            group = _tightest(level, room, members, fewest)
            if group is not None:
                return np.where(level == group, room, 0)
        return room


@dataclass(slots=True)
class Chosen:
    """The nodes chosen for one gang so far, and which of equal ones is next."""

    nodes: Sequence[Node]
    racks: Racks
    numbers: list[int] = field(default_factory=list)

    def next_of(self, equal: _IntArray, room: _IntArray) -> int:
        """Return that of the equally good nodes that is nearest to those chosen."""
        equal = self._in_the_nearest_rack(equal, room)[:_COMPARED]
        if len(equal) == 1 or not any(self.nodes[number].latency_ms for number in (*equal, *self.numbers)):
            return int(equal[0])
        numbers: list[int] = equal.tolist()
        if not self.numbers:
            return self._start(numbers)
        return min(numbers, key=lambda number: self._far(number, self.numbers))

    def _in_the_nearest_rack(self, equal: _IntArray, room: _IntArray) -> _IntArray:
        """Keep the nodes of racks, else zones, that are chosen from; at first those of the roomiest."""
        for level in self.racks.levels if len(equal) > 1 else ():
            if self.numbers:
                near = equal[np.isin(level[equal], level[self.numbers])]
            else:
                sums = np.bincount(level, room)[level[equal]]
                near = equal[sums == sums.max()]
            if len(near):
                return near
        return equal

    def _start(self, equal: list[int]) -> int:
        """Return a node of the pair that is nearest to each other."""
        one, _ = min(combinations(equal, 2), key=lambda pair: self._far(pair[0], pair[1:]))
        return one

    def _far(self, number: int, others: Sequence[int]) -> tuple[int, float]:
        """Return to how many the latency is not known, and the sum of those that are."""
        known = [latency for other in others if (latency := self._latency(number, other)) is not None]
        return len(others) - len(known), sum(known)

    def _latency(self, one: int, other: int) -> float | None:
        """Return the latency between two nodes, the worse of both ways."""
        a, b = self.nodes[one], self.nodes[other]
        ways = (a.latency_ms.get(b.name), b.latency_ms.get(a.name))
        return max((each for each in ways if each is not None), default=None)


def _tightest(level: _IntArray, room: _IntArray, members: int, fewest: int) -> int | None:
    """Return the group whose ``fewest`` roomiest nodes take all members, with the least room in all."""
    nodes = np.flatnonzero(room)
    nodes = nodes[np.lexsort((-room[nodes], level[nodes]))]
    group, free = level[nodes], room[nodes]
    begins = np.searchsorted(group, group)  # where the group of each begins
    free_of_best = np.where(np.arange(len(nodes)) - begins < fewest, free, 0)
    enough = np.flatnonzero(np.bincount(group, free_of_best) >= members)
    if not len(enough):
        return None
    sums = np.bincount(group, free)
    return int(enough[np.argmin(sums[enough])])
