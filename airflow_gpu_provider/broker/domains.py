"""Which devices of a node lie near one another: NVLink domains first, then NUMA nodes.

Members of a gang talk several times faster over NVLink than over PCIe, and slowest from one CPU socket to the
other. The choice is only among devices that are equal otherwise: nothing waits for it, and how much stays
free does not depend on it. The last domain is the smallest with room for the rest, and a single device comes
from the most broken one, so that large free domains stay whole. Which of several nodes takes a gang follows
`harm`. Next step: `spread.slots_of`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from airflow_gpu_provider.broker.model import Device

#: The number of the domain of each slot.
_Level: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Domains:
    """Of the devices of one bank, by slot."""

    nvlink: _Level
    numa: _Level

    @classmethod
    def of(cls, devices: Sequence[Device]) -> Domains | None:
        """Return the domains of a bank; None where all of its devices are as near, for what is known."""
        nvlink, numa = {each.nvlink for each in devices}, {each.numa for each in devices}
        if len(nvlink) <= 1 and len(numa) <= 1:
            return None
        return cls(
            tuple(numbered([each.nvlink for each in devices])),
            tuple(numbered([each.numa for each in devices])),
        )

    def nearest(self, slots: Sequence[int], number: int, beside: Sequence[int] = ()) -> list[int]:
        """Return ``number`` of the slots, in as few domains as can be together with those ``beside``."""
        if number >= len(slots):
            return list(slots)
        best = self._gather(slots, number, beside)
        if number < 2 or self._count(self.numa, best, beside) == 1:
            return best
        # A larger domain may hide a NUMA node in which the gang fits with no more NVLink domains.
        least = self._count(self.nvlink, best, beside)
        by_numa = Counter(self.numa[slot] for slot in slots)
        for numa, free in sorted(by_numa.items(), key=lambda each: each[1]):
            if free >= number and (not beside or numa == self.numa[beside[0]]):
                inside = self._gather([slot for slot in slots if self.numa[slot] == numa], number, beside)
                if self._count(self.nvlink, inside, beside) <= least:
                    return inside
        return best

    def _gather(self, slots: Sequence[int], number: int, beside: Sequence[int]) -> list[int]:
        return _gather(slots, number, (self.nvlink, self.numa), list(beside))

    @staticmethod
    def _count(level: _Level, slots: Sequence[int], beside: Sequence[int]) -> int:
        return len({level[slot] for slot in (*slots, *beside)})


def _gather(slots: Sequence[int], number: int, levels: tuple[_Level, ...], beside: list[int]) -> list[int]:
    """Take domains, the largest first, until one has room for the rest; there the next level decides."""
    if not levels or number >= len(slots):
        return list(slots[:number])
    level = levels[0]
    sizes = [Counter(each[slot] for slot in slots) for each in levels]
    groups: dict[int, list[int]] = {}
    for slot in slots:
        groups.setdefault(level[slot], []).append(slot)

    def size(name: int) -> tuple[int, ...]:
        # Of domains of one size, that in the emptier or fuller NUMA node.
        first = groups[name][0]
        return tuple(count[each[first]] for count, each in zip(sizes, levels, strict=True))

    chosen: list[int] = []
    while (left := number - len(chosen)) > 0:
        taken = beside + chosen
        pool = sorted({level[slot] for slot in taken} & groups.keys()) or list(groups)
        enough = [name for name in pool if len(groups[name]) >= left]
        name = min(enough, key=size) if enough else max(pool, key=size)
        chosen += _gather(groups.pop(name), left, levels[1:], taken)
    return chosen


def links_of(devices: Sequence[Device]) -> tuple[int, ...]:
    """Return the NVLink domain of each slot of a bank; a device without one is alone."""
    names = [device.nvlink for device in devices]
    return tuple(len(names) + at if name is None else names.index(name) for at, name in enumerate(names))


def free_domains(links: Sequence[int], is_free: Iterable[bool]) -> tuple[int, ...]:
    """Return the number of free devices of each NVLink domain that has any, the smallest first."""
    return tuple(sorted(Counter(link for link, free in zip(links, is_free, strict=False) if free).values()))


@lru_cache(maxsize=10_000)
def harm(free: tuple[int, ...], members: int) -> int:
    """Return what a gang does to a bank whose domains have so many free devices, and the bank to the gang.

    0: a domain takes all of it; 1: only one that could take another such gang, which is broken for it; 2: the
    gang is torn.
    """
    left = min((number - members for number in free if number >= members), default=None)
    return 2 if left is None else int(left >= members)


def numbered(names: Sequence[Hashable | None]) -> list[int]:
    """Return a number for each name. Who has none, where others have one, is alone: near to nobody."""
    known = {name: number for number, name in enumerate(dict.fromkeys(names)) if name is not None}
    if not known:
        return [0] * len(names)
    return [len(names) + at if name is None else known[name] for at, name in enumerate(names)]
