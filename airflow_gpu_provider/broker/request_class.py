"""What placement keeps of one request class: which devices suit it, how well, and what each shape costs it.

All claims of a class ask for the same, so what was worked out for one holds for the others until the fleet or
the mix changes. A class may be narrowed to some nodes: those that hold what it reads. The next step is
`placement.Placer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from airflow_gpu_provider.broker.alike import Group, groups_of
from airflow_gpu_provider.broker.capacity import Capacity
from airflow_gpu_provider.broker.costs import mismatch
from airflow_gpu_provider.broker.layout import BoolArray, FloatArray, IntArray
from airflow_gpu_provider.broker.matching import Candidates, candidates
from airflow_gpu_provider.broker.model import WHOLE_DEVICE, DeviceId, GpuRequest
from airflow_gpu_provider.broker.throughput import Speeds


@dataclass(slots=True)
class RequestClass:
    """A whole gang on each shape costs so much, infinite = no room."""

    request: GpuRequest
    suits: Candidates
    degree_of_kind: FloatArray
    degrees: tuple[float, ...]
    by_kind: FloatArray  #: [K] cost of the mismatch, infinite where the kind does not suit
    kinds: tuple[int, ...]
    groups: tuple[Group, ...]
    shares: IntArray  #: [K] what a member takes of a device
    least: int  #: what all members take at least
    #: banks that it may use whole; None = all of its kinds
    banks: IntArray | None
    #: banks that it may use in part
    partial: IntArray
    cost: FloatArray = field(default_factory=lambda: np.full(0, np.nan))  #: [G], NaN = not known yet
    share: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))  #: [G]
    generation: int = -1
    renamed: int = 0  #: entries read of the log
    revived: int = 0

    @classmethod
    def of(
        cls,
        empty: Capacity,
        request: GpuRequest,
        excluded: frozenset[DeviceId],
        *,
        speeds: Speeds,
        nodes: BoolArray | None = None,
        groups: tuple[Group, ...] | None = None,
    ) -> RequestClass:
        """Return the class on the empty fleet; only on some ``nodes`` [N], in parts of these ``groups``."""
        layout = empty.layout
        suits = candidates(layout, request, excluded, speeds=speeds, nodes=nodes)
        some, every = suits.devices.any(axis=1), (suits.devices == layout.exists).all(axis=1)
        kinds = np.unique(layout.kind_of[some])
        is_whole = bool(every[np.isin(layout.kind_of, kinds)].all())
        by_kind = np.full(len(layout.kinds), np.inf)
        by_kind[kinds] = mismatch(layout, request, speeds)[kinds]
        shares, degree_of_kind = layout.shares(request), np.zeros(len(layout.kinds))
        degree_of_kind[layout.kind_of] = suits.degree
        if groups is None:
            groups = groups_of(empty, request, suits.devices)
        else:
            groups = tuple(Group.of(layout, each.devices & suits.devices) for each in groups)
        return cls(
            request=request,
            suits=suits,
            degree_of_kind=degree_of_kind,
            degrees=tuple(np.unique(suits.degree[some])[::-1].tolist()),
            by_kind=by_kind,
            kinds=tuple(kinds.tolist()),
            groups=groups,
            shares=shares,
            least=request.gpus * int(shares[kinds].min(initial=WHOLE_DEVICE)),
            banks=None if is_whole else np.flatnonzero(some & every),
            partial=np.flatnonzero(some & ~every),
        )
