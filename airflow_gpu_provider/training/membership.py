"""Who holds which logical rank: the pure part of taking over.

A generation is a fixed assignment of processes to ranks; any change makes a new one, and a shard that meets
a newer generation abandons what it was doing. Ranks are logical: data and randomness follow the rank, so
whoever holds it does the same work. No I/O here: the supervisor acts on what this decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Membership:
    """The processes of a run. ``vacant`` are ranks whose holder is lost and that nobody has taken yet."""

    generation: int
    members: dict[str, int]  #: process to logical rank
    spares: tuple[str, ...] = ()
    vacant: tuple[int, ...] = ()

    @classmethod
    def first(cls, members: tuple[str, ...], spares: tuple[str, ...], *, generation: int = 0) -> Membership:
        """Return the membership a run starts with: ranks in the order of ``members``."""
        ranks = {uid: rank for rank, uid in enumerate(members)}
        return cls(generation=generation, members=ranks, spares=spares)

    @property
    def is_complete(self) -> bool:
        """True when every rank has a holder."""
        return not self.vacant

    @property
    def alive(self) -> tuple[str, ...]:
        """All processes that are expected to live."""
        return (*self.members, *self.spares)

    def lose(self, lost: frozenset[str]) -> Membership:
        """Return the membership without ``lost``; their ranks are vacant."""
        ranks = sorted(rank for uid, rank in self.members.items() if uid in lost)
        return replace(
            self,
            members={uid: rank for uid, rank in self.members.items() if uid not in lost},
            spares=tuple(uid for uid in self.spares if uid not in lost),
            vacant=tuple(sorted({*self.vacant, *ranks})),
        )

    def add_spare(self, uid: str) -> Membership:
        """Return the membership with one more process in waiting."""
        return replace(self, spares=(*self.spares, uid))

    def fill(
        self, parked: frozenset[str], *, promised: Mapping[int, str] = MappingProxyType({})
    ) -> tuple[Membership, dict[str, int]]:
        """Give vacant ranks to spares, warm (``parked``) ones first.

        ``promised`` ranks are for the process that is named alone, and wait where it is none of ours yet.
        Return the new membership and who took which rank. The generation moves on only when every rank has a
        holder: survivors wait for one change, not for each part of it.
        """
        keepers = {promised[rank]: rank for rank in self.vacant if promised.get(rank) in self.spares}
        free = [uid for uid in self.spares if uid not in promised.values()]
        by_readiness = sorted(free, key=lambda uid: (uid not in parked, self.spares.index(uid)))
        open_ranks = [rank for rank in self.vacant if rank not in promised]
        taken = keepers | dict(zip(by_readiness, open_ranks, strict=False))
        filled = replace(
            self,
            members={**self.members, **taken},
            spares=tuple(uid for uid in self.spares if uid not in taken),
            vacant=tuple(rank for rank in self.vacant if rank not in taken.values()),
        )
        return (filled.next() if taken and filled.is_complete else filled), taken

    def hand_over(self, newcomers: Mapping[int, str]) -> Membership:
        """Return the next generation, in which these spares hold these ranks and their old holders none."""
        kept = {uid: rank for uid, rank in self.members.items() if rank not in newcomers}
        members = {**kept, **{uid: rank for rank, uid in newcomers.items()}}
        spares = tuple(uid for uid in self.spares if uid not in members)
        return replace(self, members=members, spares=spares).next()

    def reordered(self, ranks: dict[str, int]) -> Membership:
        """Return a new generation in which the same members have these ranks."""
        return replace(self, members=ranks).next()

    def next(self) -> Membership:
        """Return the same assignment as a new generation: the retry of a synchronisation."""
        return replace(self, generation=self.generation + 1)
