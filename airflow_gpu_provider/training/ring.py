"""Where the relay of a run sits, and in which order its members pass data on, from measured latencies.

Pure. A ring all-reduce takes 2 (n - 1) rounds, and each is over when the slowest hop is (Patarasuk and Yuan,
Bandwidth optimal all-reduce algorithms, 2009): so the slowest hop counts first, then their sum. A matrix has
milliseconds from each member (row) to each, None where nothing was measured, which counts as slow as the
worst that was. Used by `slots` for nodes and by `network_watch` for shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, permutations
from typing import TypeAlias

#: Milliseconds from each member to each.
Matrix: TypeAlias = Sequence[Sequence[float | None]]
_Cost: TypeAlias = tuple[float, float]

#: All orders of so many are tried: 5040.
_EXACT = 8
_PASSES = 20


def ring_order(latency: Matrix) -> tuple[int, ...]:
    """Return the members in an order that makes a ring of low latency, the relay first.

    Up to eight are solved exactly. More begin with the nearest neighbour from each of some members and are
    improved by exchanging two hops (2-opt: Croes, A method for solving traveling-salesman problems, 1958)
    until nothing helps. Never worse than the order given, which is kept, up to its beginning, where it is as
    good as the best.
    """
    ways = _symmetric(latency)
    given = tuple(range(len(ways)))
    found = _exact(ways) if len(ways) <= _EXACT else _near(ways)
    best = found if _cost(ways, found) < _cost(ways, given) else given
    first = best.index(relay_of(latency)) if best else 0
    return best[first:] + best[:first]


def relay_of(latency: Matrix) -> int:
    """Return the member with the least latency to all others, where the store and rank 0 are best."""
    ways = _symmetric(latency)
    return min(range(len(ways)), key=lambda member: (sum(ways[member]), member), default=0)


def worst_hop(latency: Matrix, order: Sequence[int] | None = None) -> float | None:
    """Return the slowest hop of the ring in this order; None while any hop is not measured."""
    members = range(len(latency)) if order is None else order
    hops = [_way(latency, one, other) for one, other in _hops(tuple(members))]
    known = [hop for hop in hops if hop is not None]
    return max(known) if known and len(known) == len(hops) else None


def matrix_of(names: Sequence[str], latency_ms: Mapping[str, Mapping[str, float | None]]) -> Matrix:
    """Return the matrix of these members, from what each has measured of others by name."""
    return [[0.0 if one == other else latency_ms.get(one, {}).get(other) for other in names] for one in names]


def _way(latency: Matrix, one: int, other: int) -> float | None:
    """Return the worse of both directions, of those that are known."""
    return max((way for way in (latency[one][other], latency[other][one]) if way is not None), default=None)


def _symmetric(latency: Matrix) -> list[list[float]]:
    members = range(len(latency))
    ways = [[0.0 if one == other else _way(latency, one, other) for other in members] for one in members]
    worst = max((way for row in ways for way in row if way is not None), default=0.0)
    return [[worst if way is None else way for way in row] for row in ways]


def _hops(order: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the hops of a ring; two members have one way between them, one has none."""
    if len(order) < 3:
        return list(pairwise(order))
    return list(zip(order, order[1:] + order[:1], strict=True))


def _cost(ways: Sequence[Sequence[float]], order: tuple[int, ...]) -> _Cost:
    hops = [ways[one][other] for one, other in _hops(order)]
    return max(hops, default=0.0), round(sum(hops), 9)


def _exact(ways: Sequence[Sequence[float]]) -> tuple[int, ...]:
    if not ways:
        return ()
    # A ring has no beginning, so the first may stay.
    return min(((0, *rest) for rest in permutations(range(1, len(ways)))), key=lambda each: _cost(ways, each))


def _near(ways: Sequence[Sequence[float]]) -> tuple[int, ...]:
    starts = range(0, len(ways), max(1, len(ways) // 4))
    return min((_two_opt(ways, _greedy(ways, start)) for start in starts), key=lambda each: _cost(ways, each))


def _greedy(ways: Sequence[Sequence[float]], start: int) -> tuple[int, ...]:
    order, left = [start], set(range(len(ways))) - {start}
    while left:
        nearest = min(left, key=lambda member: (ways[order[-1]][member], member))
        order.append(nearest)
        left.remove(nearest)
    return tuple(order)


def _two_opt(ways: Sequence[Sequence[float]], order: tuple[int, ...]) -> tuple[int, ...]:
    """Turn parts of the ring around as long as that helps; bounded, each pass looks at every part."""
    cost = _cost(ways, order)
    for _ in range(_PASSES):
        before = cost
        for first in range(1, len(order) - 1):
            for last in range(first + 1, len(order)):
                if not _may_help(ways, order, first, last, cost[0]):
                    continue
                turned = order[:first] + order[first : last + 1][::-1] + order[last + 1 :]
                if (found := _cost(ways, turned)) < cost:
                    order, cost = turned, found
        if cost == before:
            break
    return order


def _may_help(
    ways: Sequence[Sequence[float]], order: tuple[int, ...], first: int, last: int, worst: float
) -> bool:
    """Say whether the two hops that turning a part replaces are improved; the others stay."""
    before, after = order[first - 1], order[(last + 1) % len(order)]
    old = (ways[before][order[first]], ways[order[last]][after])
    new = (ways[before][order[last]], ways[order[first]][after])
    return max(new) <= worst and (sum(new) < sum(old) or max(old) == worst > max(new))
