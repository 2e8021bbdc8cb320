"""What an agent's report means: the core's value of a device, and what the report itself cannot tell.

Used by `fleet`, which folds reports in memory.
"""

from __future__ import annotations

from airflow_gpu_provider.broker.model import Device, DeviceId, NodeName
from airflow_gpu_provider.reports import NVML_LABEL, DeviceReport, NodeReport
from airflow_gpu_provider.store.nodes import StoredNode


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
    return StoredNode(report.model_copy(update=known), stored.reported_at) if known else stored


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
