"""Whose claim is next among the heads of many queues: by rank, and among teams by their fair share.

What a team is granted moves its other claims back, so a place may be out of date when it comes up; it is then
looked up again. It can only have got worse, hence the first one that is still true is the next. The next
step is the walk of `queue.Walk`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import TypeAlias

from airflow_gpu_provider.broker.fair_share import FairShare, Place
from airflow_gpu_provider.broker.model import Claim
from airflow_gpu_provider.broker.rank import Rank

#: The claims of one class with their ranks, the next one first.
Line: TypeAlias = Sequence[tuple[Rank, Claim]]


class Order:
    """Iterates over the numbers of queues, the one whose head is next first; each `add` is told once."""

    def __init__(self, share: FairShare) -> None:
        self._share = share
        self._heads: list[tuple[Place, int]] = []
        self._claims: dict[int, tuple[Claim, Rank]] = {}

    def add(self, number: int, claim: Claim, rank: Rank) -> None:
        """Let a claim be the head of a queue; a queue has one at a time."""
        self._claims[number] = (claim, rank)
        heappush(self._heads, (self._share.place(claim, rank), number))

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        while self._heads:
            told, number = heappop(self._heads)
            place = self._share.place(*self._claims[number])
            if place == told:
                return number
            heappush(self._heads, (place, number))
        raise StopIteration


def in_order(lines: Iterable[Line], share: FairShare, limit: int | None = None) -> list[Claim]:
    """Return the first claims, the next one first: as if each were granted before the next is chosen."""
    found = list(islice(_in_order(lines, share), limit))
    share.assume_nothing()
    return found


def _in_order(lines: Iterable[Line], share: FairShare) -> Iterator[Claim]:
    some = [line for line in lines if line]
    order, at = Order(share), [0] * len(some)
    for number, line in enumerate(some):
        order.add(number, line[0][1], line[0][0])
    for number in order:
        _, claim = some[number][at[number]]
        yield claim
        share.count(claim)
        at[number] += 1
        if at[number] < len(some[number]):
            rank, claim = some[number][at[number]]
            order.add(number, claim, rank)
