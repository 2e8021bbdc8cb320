"""The claims that wait, by class, each class in its order.

All claims of a class can start exactly when its first one can, so a turn looks at first ones only: claims
further back cost nothing, however many they are. Claims that ask for the same are of two classes when they
own different reservations. The next step is the turn of `engine.Engine`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge

from airflow_gpu_provider.broker.model import Claim, ClaimId
from airflow_gpu_provider.broker.queue import ClassKey, Rank


@dataclass(slots=True)
class ClaimClass:
    """The waiting claims of one class."""

    key: ClassKey
    kinds: int  #: bit mask of the kinds of devices that suit
    owned: frozenset[str] = frozenset()  #: the reservations that are for it
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
        self, claim: Claim, key: ClassKey, kinds: int, rank: Rank, owned: frozenset[str] = frozenset()
    ) -> None:
        """Add a claim to its class."""
        of_class = self.classes.get((key, owned))
        if of_class is None:
            of_class = self.classes[key, owned] = ClaimClass(key, kinds, owned)
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

    def position(self, claim_id: ClaimId) -> int | None:
        """Return how manieth the claim is, 1 = next; None = it does not wait here."""
        where = self._where.get(claim_id)
        if where is None:
            return None
        mine = _Last(where[1])
        return sum(
            len(each.queue) - bisect_left(each.queue, mine, key=lambda entry: entry[0])
            for each in self.classes.values()
        )

    def of(self, claim_id: ClaimId) -> ClassKey | None:
        """Return the class of a claim that waits."""
        where = self._where.get(claim_id)
        return None if where is None else where[0].key

    def ordered(self) -> Iterator[Claim]:
        """Yield all claims, the next one first."""
        queues = (((entry.rank, claim) for entry, claim in reversed(c.queue)) for c in self.classes.values())
        return (claim for _, claim in merge(*queues, key=lambda each: each[0]))
