"""Which devices may serve one gang together: those of one speed.

A gang works at the pace of its slowest member: on mixed models the fast ones idle, and on a full fleet all
who wait miss that time. Only where no speed alone has enough devices on the whole fleet, free or not, may a
gang mix them. The next step is `placement.Placer`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from airflow_gpu_provider.broker.capacity import Capacity
from airflow_gpu_provider.broker.layout import BoolArray, Layout
from airflow_gpu_provider.broker.model import GpuRequest


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Devices of which one claim may take any, and their kinds."""

    devices: BoolArray
    kinds: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout, devices: BoolArray) -> Group:
        """Return the group of these devices."""
        return cls(devices, tuple(np.unique(layout.kind_of[devices.any(axis=1)]).tolist()))


def groups_of(empty: Capacity, request: GpuRequest, devices: BoolArray) -> tuple[Group, ...]:
    """Return the groups among suitable ``devices``; one of them must serve the whole request."""
    every = Group.of(empty.layout, devices)
    if request.gpus < 2:
        return (every,)
    alike = tuple(each for each in _by_speed(empty.layout, every) if empty.fits(request, each.devices))
    return alike or (every,)


def _by_speed(layout: Layout, every: Group) -> list[Group]:
    """Return the devices of each speed, the slowest first; models without a rating are kept apart."""
    speed_of = {}
    for number in every.kinds:
        kind = layout.kinds[number]
        speed_of[number] = (kind.tflops, "" if kind.tflops > 0 else kind.model)
    groups = []
    for speed in sorted(set(speed_of.values())):
        kinds = [number for number in every.kinds if speed_of[number] == speed]
        groups.append(Group(every.devices & np.isin(layout.kind_of, kinds)[:, None], tuple(kinds)))
    return groups
