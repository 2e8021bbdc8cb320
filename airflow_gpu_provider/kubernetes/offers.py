"""What kinds of devices a node offers, and how many of each.

Read from the resources of NVIDIA's device plugin (`nvidia.com/gpu`, `nvidia.com/mig-…`, with `.shared` where
they are shared under another name) and the labels of GPU feature discovery; without these, from those of the
large clouds. A MIG slice and a time slice are models of their own, as everywhere in the broker. The next step
is `slots`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from airflow_gpu_provider.broker.flavors import FLAVORS, canonical_model, tflops
from airflow_gpu_provider.kubernetes.names import GPU_PREFIX
from airflow_gpu_provider.kubernetes.quantities import count

GPU = GPU_PREFIX + "gpu"
_MIG = GPU_PREFIX + "mig-"
_SHARED = ".shared"
#: suffix of a model whose devices are parts in time of a whole one, as GPU feature discovery writes it
SHARED_MODEL = "-SHARED"

#: labels of clouds that name the model where GPU feature discovery does not run
_CLOUD_PRODUCTS = (
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "k8s.amazonaws.com/accelerator",
)
_UNKNOWN_MODEL = "UNKNOWN-GPU"
#: compute slices of a GPU that can be split: seven, but for the A30
_SLICES: Mapping[str, int] = {"A30": 4}
_MOST_SLICES = 7


@dataclass(frozen=True, slots=True)
class Offer:
    """Equal devices of a node under one resource."""

    resource: str
    slots: int  #: how many there are
    healthy: int  #: how many Kubernetes would give out now, used ones included
    model: str
    memory_mib: int  #: of each; 0 = unknown
    tflops: float  #: of each
    share: float = 1.0  #: of a whole GPU
    profile: str | None = None  #: of a MIG slice, such as "1g.10gb"


def offers_of(
    labels: Mapping[str, str], capacity: Mapping[str, object], allocatable: Mapping[str, object]
) -> tuple[Offer, ...]:
    """Return what a node offers."""
    slots = {name: count(value) for name, value in capacity.items() if _is_device(name)}
    expected = _expected(labels)
    if expected and not any(slots.values()):  # the device plugin is away, the devices are still there
        slots[GPU] = expected
    offers = (
        _offer(labels, name, number, min(number, count(allocatable.get(name, 0))))
        for name, number in sorted(slots.items())
    )
    return tuple(offer for offer in offers if offer.slots)


def _is_device(resource: str) -> bool:
    plain = resource.removesuffix(_SHARED)
    return plain == GPU or plain.startswith(_MIG)


def _expected(labels: Mapping[str, str]) -> int:
    """Return how many devices there are by the labels; 0 = they do not tell."""
    if labels.get("nvidia.com/mig.strategy") == "mixed":
        return 0
    return _number(labels, f"{GPU}.count") * max(1, _number(labels, f"{GPU}.replicas"))


def _offer(labels: Mapping[str, str], resource: str, slots: int, healthy: int) -> Offer:
    key = resource.removesuffix(_SHARED)
    product, profile = _product(labels, key)
    replicas = max(1, _number(labels, f"{key}.replicas"))
    is_shared = resource.endswith(_SHARED) or product.upper().endswith(SHARED_MODEL) or replicas > 1
    product = re.sub(f"{SHARED_MODEL}$", "", product, flags=re.IGNORECASE)
    model = canonical_model(product)
    board = model.partition("-MIG-")[0]
    share = (_slices(profile) / _SLICES.get(board, _MOST_SLICES) if profile else 1.0) / replicas
    memory = _number(labels, f"{key}.memory") or _memory_of(product, model)
    return Offer(
        resource=resource,
        slots=slots,
        healthy=healthy,
        model=model + SHARED_MODEL if is_shared else model,
        memory_mib=memory // replicas,
        tflops=round(tflops(board) * share, 3),
        share=share,
        profile=profile,
    )


def _product(labels: Mapping[str, str], key: str) -> tuple[str, str | None]:
    """Return the name of a device and its MIG profile, if it is a slice."""
    names = (f"{key}.product", f"{GPU}.product", *_CLOUD_PRODUCTS)
    product = next((labels[name] for name in names if labels.get(name)), _UNKNOWN_MODEL)
    found = re.search(r"-MIG-([0-9a-z.+]+)", product)
    if found is not None:
        return product, found[1]
    if not key.startswith(_MIG):
        return product, None
    profile = key.removeprefix(_MIG)
    return f"{product}-MIG-{profile}", profile


def _slices(profile: str) -> int:
    found = re.match(r"(?:\d+c\.)?(\d+)g\.", profile)
    return min(int(found[1]), _MOST_SLICES) or 1 if found else 1


def _memory_of(product: str, model: str) -> int:
    """Return the memory that a product's name tells, else that of its model's most common version."""
    found = re.search(r"(\d+)gb\b", product, re.IGNORECASE)
    if found is not None:
        return int(found[1]) * 1024
    known = FLAVORS.get(model)
    return known.memory_mib if known is not None else 0


def _number(labels: Mapping[str, str], name: str) -> int:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() else 0
