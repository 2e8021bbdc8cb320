"""Prefer nodes that hold what a claim reads, or refuse the others where the claim requires it.

Agents report the pretrained models and data sets on a node by path or digest. Each lacking one costs its part
of `AffinityPolicy.weight` for each milli-GPU asked, on the scale of the other costs of a placement: a node
that lacks all is as bad as one that matches so much worse. What is required and nowhere to be found makes a
claim wait, never rejects it: artifacts can be brought. The next step is the cost in `placement.Placer`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from airflow_gpu_provider.broker import reasons
from airflow_gpu_provider.broker.layout import BoolArray, FloatArray, IntArray
from airflow_gpu_provider.broker.model import Fleet, GpuRequest, Node, Reason, ReasonCode

#: Artifacts named in a sentence before the rest is only counted.
_NAMES = 3


@dataclass(frozen=True, slots=True)
class AffinityPolicy:
    """How much nearness counts."""

    weight: float = 0.25  #: of the devices asked, what a node costs that lacks all artifacts


def artifact_name(text: str) -> str:
    """Return the one way to write a path ("/data/models//gpt2/" is "/data/models/gpt2"); digests stay."""
    return posixpath.normpath(text) if text.startswith("/") else text


def lacking(nodes: Sequence[Node], request: GpuRequest) -> FloatArray:
    """Return for each node the part 0..1 of the request's artifacts that it does not hold."""
    wanted = _names(request.artifacts)
    if not wanted:
        return np.zeros(len(nodes))
    return np.array([len(wanted - _names(node.artifacts)) / len(wanted) for node in nodes], np.float64)


def affinity_cost(
    nodes: Sequence[Node], request: GpuRequest, policy: AffinityPolicy | None = None
) -> FloatArray:
    """Return for each node what the lack of artifacts adds to the cost of the whole gang, in milli-GPU."""
    weight = (policy or AffinityPolicy()).weight
    cost: FloatArray = lacking(nodes, request) * (weight * request.gpus * _shares(nodes, request))
    return cost


def _shares(nodes: Sequence[Node], request: GpuRequest) -> int | IntArray:
    """Return what a member takes of a device of each node, of its largest one where they differ."""
    if not request.is_by_memory:
        return request.milli
    sizes = (max((device.memory_mib for device in node.devices), default=0) for node in nodes)
    return np.array([request.milli_on(size) for size in sizes], np.int64)


def holders(nodes: Sequence[Node], request: GpuRequest) -> BoolArray | None:
    """Return which nodes may serve a request that requires its artifacts; None = all may."""
    if not request.artifacts_required or not request.artifacts:
        return None
    found: BoolArray = lacking(nodes, request) == 0.0
    return found


def nearest_first(nodes: Sequence[Node], request: GpuRequest) -> Iterator[BoolArray]:
    """Yield which nodes to look at: those that hold most of the artifacts, then those with less as well.

    For a placer that cannot add a cost for each node: the first of these on which the gang fits is taken. A
    request that requires its artifacts is only ever looked for on the holders of all.
    """
    lacks = lacking(nodes, request)
    for most in [0.0] if holders(nodes, request) is not None else np.unique(lacks).tolist():
        found: BoolArray = lacks <= most
        yield found


def absent_reason(request: GpuRequest, fleet: Fleet) -> Reason | None:
    """Return why a claim waits for artifacts that no node holds together; None = some node does."""
    nodes = fleet.nodes
    held = holders(nodes, request)
    if held is None or held.any():
        return None
    wanted = _names(request.artifacts)
    counts = {name: sum(name in _names(node.artifacts) for node in nodes) for name in wanted}
    rarest = sorted(wanted, key=lambda name: (counts[name], name))
    named = ", ".join(f"{name} is on {counts[name]}" for name in rarest[:_NAMES])
    more = f" and {len(wanted) - _NAMES} more" if len(wanted) > _NAMES else ""
    return Reason(
        ReasonCode.ARTIFACTS_ABSENT,
        f"asked {reasons.asked(request)} where all its {len(wanted)} artifact(s) are; none of {len(nodes)} "
        f"nodes holds them ({named}{more}); bring them to a node, or do not require them",
    )


def _names(artifacts: Iterable[str]) -> frozenset[str]:
    return frozenset(artifact_name(text) for text in artifacts)
