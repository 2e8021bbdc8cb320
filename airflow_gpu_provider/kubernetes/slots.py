"""Which slots of a node are free, by what Kubernetes counts.

Kubernetes gives out numbers, not devices, so a slot stands for "one more pod with one GPU can run here". Pods
of others close slots, and devices that the device plugin does not vouch for do; slots under lease are never
closed for others' sake. Invariant: of a resource never more slots are open than Kubernetes could still serve.
Pure; the next step is `report`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from airflow_gpu_provider.inventory.health import HealthSigns, suspect_reason
from airflow_gpu_provider.kubernetes.dcgm import Reading
from airflow_gpu_provider.kubernetes.offers import Offer
from airflow_gpu_provider.kubernetes.pods import PodUse

_NAMED_PODS = 3


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of an offer."""

    index: int
    reading: Reading | None = None  #: of the GPU that most likely serves it; None = not measured
    suspect: str | None = None  #: what is wrong with it
    unavailable: str | None = None  #: why it is not free although nothing is wrong


def slots_of(
    offer: Offer,
    pods: Iterable[PodUse],
    leases: Mapping[int, frozenset[str]],
    readings: Sequence[Reading] = (),
) -> tuple[Slot, ...]:
    """Return the slots of an offer. ``leases`` are the live ones by slot, ``pods`` all pods of the node."""
    using = [pod for pod in pods if pod.needs.gpus.get(offer.resource, 0)]
    others = _others(offer, using, leases)
    measured = _matched(offer, using, leases, readings)
    faults = {index: fault for index, reading in measured.items() if (fault := _fault(reading))}
    free = [index for index in range(offer.slots) if index not in leases]
    missing = offer.slots - offer.healthy
    # The last first, so that the same ones stay closed; before them those that were seen at fault, or used.
    at_fault_first = sorted(free, key=lambda index: (index not in faults, -index))
    held = sorted(leases, key=lambda index: (index not in faults, -index))
    unhealthy = frozenset([*at_fault_first, *held][:missing])
    seen = {index for index, reading in measured.items() if reading.pod}
    used_first = sorted(set(free) - unhealthy, key=lambda index: (index not in seen, -index))
    used = frozenset(used_first[: others.total()])
    absent, taken = _absent(offer), _taken(others)
    return tuple(
        Slot(
            index=index,
            reading=measured.get(index),
            suspect=faults.get(index) or (absent if index in unhealthy else None),
            unavailable=taken if index in used else None,
        )
        for index in range(offer.slots)
    )


def _others(offer: Offer, using: Iterable[PodUse], leases: Mapping[int, frozenset[str]]) -> Counter[str]:
    """Return the devices taken beyond what live leases hold here, by pod."""
    covered = Counter(lease for held in leases.values() for lease in held)
    others: Counter[str] = Counter()
    for pod in using:
        taken = pod.needs.gpus[offer.resource]
        within = min(taken, covered[pod.lease]) if pod.lease else 0
        if pod.lease:
            covered[pod.lease] -= within
        if taken > within:
            others["/".join(pod.name)] += taken - within
    return others


def _matched(
    offer: Offer,
    using: Iterable[PodUse],
    leases: Mapping[int, frozenset[str]],
    readings: Sequence[Reading],
) -> dict[int, Reading]:
    """Return which GPU's measurements to show for which slot.

    A pod under lease says which GPUs it got. Of the others those with a fault or a pod are shown by the last
    free slots, which are closed first, and the rest in order.
    """
    lease_of = {pod.name: pod.lease for pod in using if pod.lease}
    matched: dict[int, Reading] = {}
    left: list[Reading] = []
    for reading in readings:
        lease = lease_of.get(reading.pod) if reading.pod else None
        slot = next((i for i in sorted(leases) if lease in leases[i] and i not in matched), None)
        if lease is None or slot is None:
            left.append(reading)
        else:
            matched[slot] = reading
    closing = [reading for reading in left if reading.pod or _fault(reading)]
    calm = [reading for reading in left if not (reading.pod or _fault(reading))]
    unmatched = [index for index in range(offer.slots) if index not in matched]
    held = [index for index in unmatched if index in leases]
    free = [index for index in unmatched if index not in leases]
    matched.update(zip([*free[::-1], *held], closing, strict=False))
    rest = [index for index in [*free, *held] if index not in matched]
    matched.update(zip(rest, calm, strict=False))
    return matched


def _fault(reading: Reading) -> str | None:
    return suspect_reason(HealthSigns(xids=() if reading.xid is None else (reading.xid,)))


def _absent(offer: Offer) -> str:
    return (
        f"Kubernetes offers {offer.healthy} of {offer.slots} {offer.resource}: a device is unhealthy, or the "
        "device plugin does not run; see its log"
    )


def _taken(others: Counter[str]) -> str:
    names = sorted(others)
    more = f" and {len(names) - _NAMED_PODS} more" if len(names) > _NAMED_PODS else ""
    return f"used by pods outside the broker: {', '.join(names[:_NAMED_PODS])}{more}"
