"""A node of a cluster as a report to the broker.

Room on the node is what is left beside pods that are not the broker's: for its own it counts by the leases.
The next step is `probe`, which keeps a report until something it was made of changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from airflow_gpu_provider.inventory.probe import Leases
from airflow_gpu_provider.kubernetes.dcgm import Reading
from airflow_gpu_provider.kubernetes.names import CLUSTER_LABEL, node_name, slot_id
from airflow_gpu_provider.kubernetes.nodes import ClusterNode
from airflow_gpu_provider.kubernetes.offers import Offer
from airflow_gpu_provider.kubernetes.pods import NOTHING, PodUse
from airflow_gpu_provider.kubernetes.slots import Slot, slots_of
from airflow_gpu_provider.reports import DeviceReport, NodeReport


def node_report(
    cluster: str, node: ClusterNode, pods: Iterable[PodUse], leases: Leases, readings: Sequence[Reading] = ()
) -> NodeReport:
    """Return the report of a node."""
    pods = tuple(pods)
    name, ids = node_name(cluster, node.name), slot_ids(cluster, node)
    live = {lease for resource in ids.values() for each in resource for lease in leases.get(each, ())}
    others = NOTHING
    for pod in pods:
        if pod.lease not in live:
            others = others.plus(pod.needs)
    devices: list[DeviceReport] = []
    for offer in node.offers:
        own = ids[offer.resource]
        held = {index: leases[each] for index, each in enumerate(own) if leases.get(each)}
        slots = slots_of(offer, pods, held, [each for each in readings if each.profile == offer.profile])
        devices += [_device(own[slot.index], offer, slot, node.closed) for slot in slots]
    return NodeReport(
        name=name,
        host=name,  # no worker's: whoever is bound to its own host must not get these devices
        # whole cores: pods come and go, and a placement need not hear of a tenth of a core
        cpu_cores=max(0, int(node.cpu_cores - others.cpu_cores)),
        memory_mib=max(0, node.memory_mib - others.memory_mib),
        labels={**node.labels, CLUSTER_LABEL: cluster},
        devices=tuple(devices),
    )


def slot_ids(cluster: str, node: ClusterNode) -> dict[str, list[str]]:
    """Return the ids of a node's slots by resource."""
    return {
        offer.resource: [slot_id(cluster, node.name, offer.resource, index) for index in range(offer.slots)]
        for offer in node.offers
    }


def _device(own_id: str, offer: Offer, slot: Slot, closed: str | None) -> DeviceReport:
    reading = slot.reading
    measured = {} if reading is None else {
        "utilisation": reading.utilisation,
        "memory_used_mib": reading.memory_used_mib,
        "temperature_c": reading.temperature_c,
        # one meter a board: a slice or a time slice would count it again
        "power_w": reading.power_w if offer.share == 1 else None,
    }  # fmt: skip
    return DeviceReport.model_validate(
        {
            "id": own_id,
            "model": offer.model,
            "memory_mib": offer.memory_mib,
            "tflops": offer.tflops,
            "share": offer.share,
            "suspect": slot.suspect,
            "unavailable": closed or slot.unavailable,
            **measured,
        }
    )
