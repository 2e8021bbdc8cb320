"""Prefer nodes that hold what a claim reads, or refuse the others where the claim requires it.

Agents report the pretrained models and data sets on a node by path or digest. A node that lacks all of what a
claim reads is as bad as one that matches by `AffinityPolicy.weight` worse. What is required and nowhere to be
found makes a claim wait, never rejects it: artifacts can be brought. The next step is `placement.Placer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from airflow_gpu_provider.broker import reasons
from airflow_gpu_provider.broker.layout import BoolArray, FloatArray
from airflow_gpu_provider.broker.model import GpuRequest, Node, Reason, ReasonCode

#: Artifacts named in a sentence before the rest is only counted.
_NAMES = 3
#: Sets of artifacts of which it is kept where they are.
_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class AffinityPolicy:
    """How much nearness counts."""

    weight: float = 0.25  #: match degree that a node loses which lacks all artifacts


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Nodes that lack at most so much of what a request reads."""

    lack: float  #: part of the artifacts, 0..1
    nodes: BoolArray | None  #: [N]; None = every node
    weight: float = 0.0

    def worth(self, match_degree: float) -> float:
        """Return how good a match here is: what is lacking counts like so much less speed."""
        return match_degree - self.weight * self.lack


EVERYWHERE = Level(0.0, None)


class Nearness:
    """What nodes lack of what requests read, kept for as long as no artifact moves."""

    def __init__(self, nodes: Sequence[Node], policy: AffinityPolicy | None = None) -> None:
        self._nodes = nodes
        self._weight = (policy or AffinityPolicy()).weight
        self._levels: dict[frozenset[str], tuple[Level, ...]] = {}

    def levels(self, request: GpuRequest) -> tuple[Level, ...]:
        """Return which nodes to look at: those that hold most of the artifacts, then those with less too."""
        found = self._levels.get(request.artifacts)
        if found is None:
            if len(self._levels) >= _REQUESTS:
                self._levels.clear()
            found = self._levels[request.artifacts] = self._found(request)
        return found

    def holders(self, request: GpuRequest) -> BoolArray | None:
        """Return which nodes may serve a request that requires its artifacts; None = all may."""
        if not request.artifacts_required or not request.artifacts:
            return None
        nearest = self.levels(request)[0]
        if nearest.lack > 0:
            return np.zeros(len(self._nodes), np.bool_)
        return nearest.nodes

    def _found(self, request: GpuRequest) -> tuple[Level, ...]:
        lacks = lacking(self._nodes, request)
        farthest = float(lacks.max(initial=0.0))
        return tuple(
            Level(lack, None if lack == farthest else lacks <= lack, self._weight)
            for lack in np.unique(lacks).tolist() or [0.0]
        )


def lacking(nodes: Sequence[Node], request: GpuRequest) -> FloatArray:
    """Return for each node the part 0..1 of the request's artifacts that it does not hold."""
    wanted = request.artifacts
    if not wanted:
        return np.zeros(len(nodes))
    return np.array([len(wanted - node.artifacts) / len(wanted) for node in nodes], np.float64)


def absent_reason(request: GpuRequest, nodes: Sequence[Node], suitable: int) -> Reason | None:
    """Return why a claim waits for artifacts that it requires; None = it does not wait for them.

    ``suitable`` counts the devices that would do on the nodes that hold all, and are too few even when free.
    """
    if not request.artifacts_required or not request.artifacts:
        return None
    wanted = request.artifacts
    holders = sum(wanted <= node.artifacts for node in nodes)
    what = f"asked {reasons.asked(request)} where all its {len(wanted)} artifact(s) are"
    if holders:
        return Reason(
            ReasonCode.ARTIFACTS_ABSENT,
            f"{what}; the {holders} of {len(nodes)} nodes that hold them have {suitable} suitable device(s), "
            "even when all are free that is too little; bring them to more nodes, or do not require them",
        )
    counts = {name: sum(name in node.artifacts for node in nodes) for name in wanted}
    rarest = sorted(wanted, key=lambda name: (counts[name], name))
    named = ", ".join(f"{name} is on {counts[name]}" for name in rarest[:_NAMES])
    more = f" and {len(wanted) - _NAMES} more" if len(wanted) > _NAMES else ""
    return Reason(
        ReasonCode.ARTIFACTS_ABSENT,
        f"{what}; none of {len(nodes)} nodes holds them ({named}{more}); bring them to a node, or do not "
        "require them",
    )
