"""Which nodes a request may use by their labels: those with the labels it asks for, and no taint against it.

A taint keeps off all who do not tolerate it. It is a label too, ``taint=NAME`` or ``taint=NAME,OTHER``, so
that an agent says it like any other fact of its node. The next step is `matching.candidates`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from airflow_gpu_provider.broker.model import GpuRequest, Node

TAINT = "taint"
#: tolerates every taint
EVERY = "*"


def taints_of(node: Node) -> frozenset[str]:
    """Return the taints of a node."""
    return frozenset(filter(None, (name.strip() for name in node.labels.get(TAINT, "").split(","))))


def serves(node: Node, request: GpuRequest) -> bool:
    """Return whether a request may use a node."""
    labels = (wanted.partition("=") for wanted in request.node_labels)
    if any(node.labels.get(name) != value for name, _, value in labels):
        return False
    return EVERY in request.tolerates or taints_of(node) <= request.tolerates


def serving(nodes: Sequence[Node], is_tainted: bool, request: GpuRequest) -> npt.NDArray[np.bool_] | None:
    """Return which nodes a request may use; None = all. ``is_tainted`` tells whether any has a taint."""
    if not request.node_labels and not is_tainted:
        return None
    return np.array([serves(node, request) for node in nodes], np.bool_)
