"""The claims that wait, by class, each class in its order.

All claims of a class can start exactly when its first one can, so a turn looks at first ones only: claims
further back cost nothing, however many they are. Claims that ask for the same are of two classes when they
own different reservations. The next step is the turn of `engine.Engine`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice

from airflow_gpu_provider.broker.classes import ClassKey
from airflow_gpu_provider.broker.fair_share import FairShare
from airflow_gpu_provider.broker.model import Claim, ClaimId, GpuRequest
from airflow_gpu_provider.broker.order import Order, in_order
from airflow_gpu_provider.broker.rank import Rank


@dataclass(slots=True)
class ClaimClass:
    """The waiting claims of one class."""

    key: ClassKey
    kinds: int  #: bit mask of the kinds of devices that suit
    owned: frozenset[str] = frozenset()  #: the reservations that are for it
    there: float = 1.0  #: the part of what it reads that is on one node, as its ranks have it
    #: sorted, the last one is next: taking it moves no other
    queue: list[tuple[_Last, Claim]] = field(default_factory=list)

    @property
    def first(self) -> Claim:
        """The next one."""
        return self.queue[-1][1]

    @property
    def rank(self) -> Rank:
        """The rank of the next one."""
        return self.queue[-1][0].rank


@dataclass(frozen=True, slots=True)
class _Last:
    """Sorts ranks the other way round."""

    rank: Rank

    def __lt__(self, other: _Last) -> bool:
        return other.rank < self.rank


class Pending:
    """Claims by class and by id."""

    def __init__(self) -> None:
        self.classes: dict[tuple[ClassKey, frozenset[str]], ClaimClass] = {}
        self._where: dict[ClaimId, tuple[ClaimClass, Rank]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, claim_id: ClaimId) -> bool:
        return claim_id in self._where

    def add(
        self,
        claim: Claim,
        key: ClassKey,
        kinds: int,
        rank: Rank,
        *,
        owned: frozenset[str] = frozenset(),
        there: float = 1.0,
    ) -> None:
        """Add a claim to its class; ``rank`` counts that so much of what it reads is ``there``."""
        of_class = self.classes.get((key, owned))
        if of_class is None:
            of_class = self.classes[key, owned] = ClaimClass(key, kinds, owned, there)
        insort(of_class.queue, (_Last(rank), claim), key=lambda each: each[0])
        self._where[claim.id] = (of_class, rank)

    def remove(self, claim_id: ClaimId) -> ClaimClass | None:
        """Forget a claim and return its class; None = it does not wait here."""
        where = self._where.pop(claim_id, None)
        if where is None:
            return None
        of_class, rank = where
        del of_class.queue[bisect_left(of_class.queue, _Last(rank), key=lambda each: each[0])]
        if not of_class.queue:
            del self.classes[of_class.key, of_class.owned]
        return of_class

    def reread(self, there: Callable[[GpuRequest], float]) -> list[Claim]:
        """Remove and return the claims of which another part of what they read is at one node by now."""
        moved = [
            claim
            for of_class in self.classes.values()
            if of_class.key.request.artifacts and there(of_class.key.request) != of_class.there
            for _, claim in of_class.queue
        ]
        for claim in moved:
            self.remove(claim.id)
        return moved

    def take(
        self, classes: list[ClaimClass], share: FairShare, visit: Callable[[Claim, ClassKey], bool]
    ) -> dict[ClaimId, Claim]:
        """Let claims of these classes be visited in their order; remove and return those that could start.

        The first one of a class that cannot is the last of it that is looked at.
        """
        taken: dict[ClaimId, Claim] = {}
        order = Order(share)
        for number, each in enumerate(classes):
            order.add(number, each.first, each.rank)
        for number in order:
            of_class = classes[number]
            claim = of_class.first
            if visit(claim, of_class.key):
                taken[claim.id] = claim
                self.remove(claim.id)
                if of_class.queue:
                    order.add(number, of_class.first, of_class.rank)
        return taken

    def all(self) -> Iterator[Claim]:
        """Yield the claims, class by class."""
        return (claim for of_class in self.classes.values() for _, claim in reversed(of_class.queue))

    def judged_otherwise(self, anew: Set[str], moved: Set[str]) -> list[Claim]:
        """Return those whose kind of work became known or unknown, and strict ones whose speeds moved."""
        return [
            claim
            for claim in self.all()
            if claim.task_class in anew or (claim.request.strict and claim.task_class in moved)
        ]

    def owned_otherwise(self, owned_by: Callable[[Claim], frozenset[str]]) -> list[Claim]:
        """Return the claims that own other reservations than those of their class."""
        found: dict[tuple[str | None, str | None], frozenset[str]] = {}
        moved = []
        for of_class in self.classes.values():
            for _, claim in of_class.queue:
                who = claim.team, claim.dag_id
                if who not in found:
                    found[who] = owned_by(claim)
                if found[who] != of_class.owned:
                    moved.append(claim)
        return moved

    def ordered(self, share: FairShare, limit: int | None = None) -> list[Claim]:
        """Return all claims, or the first ones, the next one first."""
        lines = (((entry.rank, claim) for entry, claim in reversed(c.queue)) for c in self.classes.values())
        if share.is_on:
            return in_order([list(islice(line, limit)) for line in lines], share, limit)
        return [claim for _, claim in islice(merge(*lines, key=lambda each: each[0]), limit)]

    def heads(self, share: FairShare, some: Sequence[ClaimClass] | None = None) -> Iterator[ClaimClass]:
        """Yield all classes, or some, in the order in which a turn looks at them."""
        classes, order = list(self.classes.values()) if some is None else some, Order(share)
        for number, each in enumerate(classes):
            order.add(number, each.first, each.rank)
        return (classes[number] for number in order)
