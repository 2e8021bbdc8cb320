"""Which devices suit a request, and how well.

Model, memory, host, labels, taints and excluded devices filter hard; TFLOPS filter only a strict request and
otherwise give the match degree of requirement A4. Speeds measured of the request's class replace the TFLOPS
in both; that a claim never becomes impossible because something was learned is the business of `strictness`.
Whether a suitable device is free is not asked here; that is the next step, `capacity.Capacity`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from airflow_gpu_provider.broker.flavors import canonical_model, is_slice
from airflow_gpu_provider.broker.layout import BoolArray, FloatArray, Kind, Layout
from airflow_gpu_provider.broker.model import DeviceId, GpuRequest
from airflow_gpu_provider.broker.node_labels import serving

if TYPE_CHECKING:
    from airflow_gpu_provider.broker.throughput import Speeds


def match_degree(tflops: float, required: float) -> float:
    """Return min(1, tflops / required): 1 = as fast as asked; no wish is always met."""
    return 1.0 if required <= 0 else min(1.0, tflops / required)


def wanted_models(request: GpuRequest) -> frozenset[str]:
    """Return the short names of the models that a request accepts; empty = any."""
    return frozenset(canonical_model(model) for model in request.models)


def accepts(request: GpuRequest, *, model: str, memory_mib: int, tflops: float) -> bool:
    """Return whether a device of this kind may serve the request."""
    if request.gpus > 1 and is_slice(model):
        return False  # CUDA shows a process one slice only, and slices do not talk to each other
    models = wanted_models(request)
    if models and canonical_model(model) not in models:
        return False
    return memory_mib >= request.memory_mib and not (request.strict and tflops < request.min_tflops)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The devices of a fleet that suit a request, free or not."""

    devices: BoolArray  #: [B, W]
    degree: FloatArray  #: [B] match degree of the bank's devices

    def of_degree(self, least: float) -> BoolArray:
        """Return only the devices that match at least so well."""
        found: BoolArray = self.devices & (self.degree >= least)[:, None]
        return found


def candidates(
    layout: Layout,
    request: GpuRequest,
    excluded: Set[DeviceId] = frozenset(),
    *,
    speeds: Speeds | None = None,
    nodes: BoolArray | None = None,
) -> Candidates:
    """Return the suitable devices of a fleet.

    ``speeds`` are those measured of its class; ``nodes`` [N] are those that may serve at all, such as the
    holders of required artifacts.
    """
    speed = speeds_of(layout.kinds, speeds)
    suits = np.array(
        [
            accepts(request, model=kind.model, memory_mib=kind.memory_mib, tflops=each)
            for kind, each in zip(layout.kinds, speed.tolist(), strict=True)
        ],
        np.bool_,
    )
    rows = suits[layout.kind_of]
    if request.host is not None:
        on_host = np.array([host == request.host for host in layout.hosts], np.bool_)
        rows &= on_host[layout.host_of[layout.node_of]]
    labelled = serving(layout.nodes, layout.is_tainted, request)
    if labelled is not None:
        rows &= labelled[layout.node_of]
    if nodes is not None:
        rows &= nodes[layout.node_of]
    devices = layout.exists & rows[:, None]
    for device in excluded:
        place = layout.place_of.get(device)
        if place is not None:
            devices[place] = False
    return Candidates(devices, degrees(speed, request)[layout.kind_of])


def speeds_of(kinds: Sequence[Kind], speeds: Speeds | None) -> FloatArray:
    """Return the speed [K] of each kind: measured where that is known, else rated."""
    return np.array(
        [kind.tflops if speeds is None else speeds.of(kind.model, kind.tflops) for kind in kinds], np.float64
    )


def degrees(speed: FloatArray, request: GpuRequest) -> FloatArray:
    """Return the match degree [K] of each kind. Without a wish all match: what is lost is then a cost."""
    return np.array([match_degree(each, request.min_tflops) for each in speed.tolist()], np.float64)
