"""What an agent's report means: the core's value of a device, what matters of it, and what it cannot tell.

Used by `fleet`, which folds reports in memory.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from airflow_gpu_provider.broker.model import Device, DeviceId, NodeName
from airflow_gpu_provider.reports import NVML_LABEL, DeviceReport, NodeReport
from airflow_gpu_provider.store.nodes import StoredNode

#: What a placement depends on, of a device. One call for all: it is compared eight thousand times a second.
_OF_DEVICE = attrgetter(
    *("id", "model", "memory_mib", "tflops", "nvlink", "numa"),
    *("suspect", "foreign_pids", "unavailable", "simulated"),
)


def facts(report: NodeReport, max_load: float) -> tuple[object, ...]:
    """Return what a placement depends on, without the measurements that change every second."""
    load, labels = report.load, report.labels
    return (
        report.host,
        report.cpu_cores,
        report.memory_mib,
        tuple(sorted(labels.items())) if labels else (),
        report.echo_at,
        # Both: rounding alone would hide that a node is too busy from now on, or no longer.
        None if load is None else (round(load, 1), load >= max_load),
        report.artifacts or (),
        tuple(map(_OF_DEVICE, report.devices)),
    )


def has_device(report: NodeReport, device_id: str) -> bool:
    """Return whether a report names the device."""
    return any(device.id == device_id for device in report.devices)


def completed(stored: StoredNode, before: NodeReport) -> StoredNode:
    """Return a report with what it cannot tell: artifacts it does not name, devices behind a dead driver.

    An agent that starts before the driver is loaded sees no devices. They are not gone, only out of reach.
    """
    report = stored.report
    known: dict[str, object] = {}
    if report.artifacts is None and before.artifacts:
        known["artifacts"] = before.artifacts
    if not report.devices and before.devices and (why := report.labels.get(NVML_LABEL)):
        known["devices"] = tuple(
            DeviceReport(
                id=device.id,
                model=device.model,
                memory_mib=device.memory_mib,
                tflops=device.tflops,
                share=device.share,
                suspect=why,
                simulated=device.simulated,
            )
            for device in before.devices
        )
    return replace(stored, report=report.model_copy(update=known)) if known else stored


def unavailable_reason(device: DeviceReport) -> str | None:
    """Return why a device is not offered, None when it is fine."""
    if device.suspect:
        return device.suspect
    if device.foreign_pids:
        pids = ", ".join(str(pid) for pid in device.foreign_pids[:5])
        return f"used by processes outside the broker (pid {pids})"
    return device.unavailable


def to_device(report: DeviceReport, node: str, tflops: float) -> Device:
    """Return the core's value of a device."""
    return Device(
        id=DeviceId(report.id),
        node=NodeName(node),
        model=report.model,
        memory_mib=report.memory_mib,
        tflops=tflops,
        utilisation=report.utilisation,
        memory_used_mib=report.memory_used_mib,
        unavailable=unavailable_reason(report),
        simulated=report.simulated,
        nvlink=report.nvlink,
        numa=report.numa,
    )
