"""How many devices of a lease that may shrink would let others start, who wait.

Counted by giving devices back on the arrays of a turn, looking whom they would serve, and taking them again:
it leaves nothing behind, and costs one search of places for each class that waits for such devices. Nobody is
served past a claim that waits for them and cannot be: what is given back would be kept for that one, idle.
Used by `resizing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from airflow_gpu_provider.broker.capacity import Capacity, Part, part_of
from airflow_gpu_provider.broker.classes import ClassKey
from airflow_gpu_provider.broker.model import GpuRequest
from airflow_gpu_provider.broker.placement import Placer
from airflow_gpu_provider.broker.strictness import judged_by


def wanted_back(
    surplus: Sequence[Part], waiting: Iterable[ClassKey], capacity: Capacity, placer: Placer
) -> int:
    """Return how many of these parts, the first ones, have to be free so that the first waiting claims start.

    ``waiting`` are the classes that wait, in their order.
    """
    lent: list[Part] = []  # of the surplus, free meanwhile
    served: list[Part] = []
    wanted = 0
    try:
        for key in waiting:
            asked = judged_by(key, placer).request
            if not _suits_any(surplus, asked, key, placer):
                continue
            while (found := _place(asked, key, capacity, placer)) is None and len(lent) < len(surplus):
                capacity.give(surplus[len(lent)])
                lent.append(surplus[len(lent)])
            if found is None:
                break
            capacity.take(found)
            served.append(found)
            wanted = len(lent)
    finally:
        for part in served:
            capacity.give(part)
        for part in lent:
            capacity.take(part)
    return wanted


def _place(asked: GpuRequest, key: ClassKey, capacity: Capacity, placer: Placer) -> Part | None:
    found = placer.place(asked, key.excluded)
    return None if found is None else part_of(capacity.layout, asked, found.places)


def _suits_any(surplus: Sequence[Part], asked: GpuRequest, key: ClassKey, placer: Placer) -> bool:
    suitable = placer.suitable(asked, key.excluded)
    return any(suitable[bank, slot] for part in surplus for bank, slot, _ in part.devices)
