"""Which nodes measure the latency to one another: few at a time, in rounds, and each pair both ways.

The nodes of a rack, and those of a zone (all that name none are one), stand in a ring by name. In a round
everybody asks those at a few distances from it, to both sides; the rounds go through all distances. So every
pair of a group of n is measured within `rounds_of(n)` rounds, by both of its nodes in the same round. In
groups above 1000 only nodes up to `_FARTHEST` places apart are asked. Pure; `server.probing` counts the
rounds and adds the nodes that share a gang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

#: Distances of a round in a ring; each is two peers, one to each side.
_DISTANCES = 4
_FARTHEST = 500

#: The names of a group, in order.
_Ring: TypeAlias = Sequence[str]


@dataclass(frozen=True, slots=True)
class Station:
    """A node that answers questions."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


class Peers:
    """Who asks whom in each round, for one fleet."""

    def __init__(self, stations: Iterable[Station]) -> None:
        groups: dict[tuple[str | None, ...], list[str]] = {}
        for station in stations:
            zone, rack = station.labels.get("zone"), station.labels.get("rack")
            groups.setdefault((zone,), []).append(station.name)
            if rack is not None:
                groups.setdefault((zone, rack), []).append(station.name)
        self._places: dict[str, list[tuple[_Ring, int]]] = {}
        for ring in map(sorted, groups.values()):
            for place, name in enumerate(ring):
                self._places.setdefault(name, []).append((ring, place))

    def of(self, name: str, number: int) -> frozenset[str]:
        """Return whom a node asks in the round of this number."""
        found: set[str] = set()
        for ring, place in self._places.get(name, ()):
            first = number % rounds_of(len(ring)) * _DISTANCES
            found.update(_around(ring, place, range(first + 1, first + _DISTANCES + 1)))
        return frozenset(found - {name})


def rounds_of(nodes: int) -> int:
    """Return after how many rounds every pair of a group has been asked."""
    return max(1, -(-min(nodes // 2, _FARTHEST) // _DISTANCES))


def of_gang(nodes: Iterable[str], name: str, reach: int = 16) -> frozenset[str]:
    """Return whom a node of a gang asks, always: all others, in a large gang those near it in the ring."""
    ring = sorted(nodes)
    return frozenset(_around(ring, ring.index(name), range(1, reach + 1))) - {name}


def _around(ring: _Ring, place: int, distances: range) -> Iterable[str]:
    for distance in distances:
        if distance <= len(ring) // 2:
            yield ring[(place + distance) % len(ring)]
            yield ring[place - distance]
