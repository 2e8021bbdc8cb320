"""A fleet for people without GPUs: devices that can be leased, look busy while leased and can be broken.

It is a product, not a mock: the demo, the tests and a laptop run on it, and everything above the probe is the
same as on real devices. Ids depend only on host, node and position, so a restarted agent reports the same
devices. Faults come from a JSON file that may be edited while the agent runs. `fleet_spec` reads the text
that describes the fleet; the next step is `agent.Agent`.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from airflow_gpu_provider.inventory import host
from airflow_gpu_provider.inventory.fleet_spec import NodeSpec
from airflow_gpu_provider.inventory.probe import NO_LEASES, Leases
from airflow_gpu_provider.reports import DeviceReport, NodeReport

#: What a simulated node has for each device: the shape of a common 8-GPU server (128 cores, 1 TiB).
CORES_PER_DEVICE = 16
MEMORY_MIB_PER_DEVICE = 131_072

_UUID_SPACE = uuid.UUID("6f1d0f5e-3c0b-5a7e-9a53-0f6a5e1c7d21")
#: (utilisation, share of memory, temperature in °C, power in W) of an idle and of a leased device
_IDLE = (0.0, 0.0, 34.0, 55.0)
_BUSY = (0.92, 0.6, 67.0, 260.0)

log = logging.getLogger(__name__)


def simulated_id(host_name: str, node: str, index: int) -> str:
    """Return the id of a simulated device; the same for the same place."""
    return f"GPU-sim-{uuid.uuid5(_UUID_SPACE, f'{host_name}/{node}/{index}')}"


class SimulatedProbe:
    """Reads a fleet that does not exist."""

    def __init__(
        self, nodes: Sequence[NodeSpec], *, host_name: str | None = None, faults: Path | None = None
    ) -> None:
        self._faults = FaultFile(faults)
        name = host_name or host.local_host()
        self._nodes = tuple(_node_report(name, node) for node in nodes)

    def read(self, leases: Leases = NO_LEASES) -> tuple[NodeReport, ...]:
        """Return the fleet: devices in ``leases`` look busy, faults of the file are applied."""
        faults = self._faults.read()
        return tuple(
            node.model_copy(
                update={
                    "devices": tuple(
                        _device_now(device, device.id in leases, faults.get(device.id))
                        for device in node.devices
                    )
                }
            )
            for node in self._nodes
            if not _is_silent(faults.get(node.name))
        )


class FaultFile:
    """A JSON file of faults, read again whenever it changes.

    Keys are device ids or node names. The value of a device overrides fields of its report, such as
    ``{"suspect": "uncorrectable ECC"}`` or ``{"foreign_pids": [4711]}``; ``{"silent": true}`` on a node
    stops its reports, as if the machine had died. A file that cannot be read changes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._faults: Mapping[str, Mapping[str, Any]] = {}

    def read(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the faults that hold now."""
        if self._path is None:
            return self._faults
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            self._seen, self._faults = None, {}
            return self._faults
        if (stat.st_mtime_ns, stat.st_size) != self._seen:
            self._seen = (stat.st_mtime_ns, stat.st_size)
            self._faults = self._parsed(self._path)
        return self._faults

    def _parsed(self, path: Path) -> Mapping[str, Mapping[str, Any]]:
        try:
            content = json.loads(path.read_text())
            if not isinstance(content, dict) or not all(
                isinstance(value, dict) for value in content.values()
            ):
                raise ValueError("it must be an object of objects")
            for name, value in content.items():
                if name.startswith("GPU-"):
                    _checked_fault(value)
        except (OSError, ValueError) as error:
            log.warning(
                'Faults in %s not taken: %s. Write {"GPU-sim-…": {"suspect": "uncorrectable ECC"}}; '
                "the faults read before still hold.",
                path,
                error,
            )
            return self._faults
        log.info("Faults read from %s: %d entries", path, len(content))
        return content


def _checked_fault(value: Mapping[str, Any]) -> DeviceReport:
    """Return a device with these fields, or raise ValueError naming the field that is wrong."""
    sample: dict[str, Any] = {"id": "GPU-sim", "model": "A100", "memory_mib": 1, "tflops": 1.0}
    try:
        return DeviceReport.model_validate({**sample, **value})
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _is_silent(fault: Mapping[str, Any] | None) -> bool:
    return bool(fault and fault.get("silent"))


def _node_report(host_name: str, node: NodeSpec) -> NodeReport:
    return NodeReport(
        name=node.name,
        host=host_name,
        cpu_cores=CORES_PER_DEVICE * len(node.devices),
        memory_mib=MEMORY_MIB_PER_DEVICE * len(node.devices),
        labels={"simulated": "true"},
        devices=tuple(
            DeviceReport(
                id=simulated_id(host_name, node.name, index),
                model=device.model,
                memory_mib=device.memory_mib,
                tflops=device.tflops,
                ecc_uncorrected=0,
                simulated=True,
            )
            for index, device in enumerate(node.devices)
        ),
    )


def _device_now(device: DeviceReport, leased: bool, fault: Mapping[str, Any] | None) -> DeviceReport:
    utilisation, memory, temperature, power = _BUSY if leased else _IDLE
    fields: dict[str, Any] = {
        "utilisation": utilisation,
        "memory_used_mib": int(device.memory_mib * memory),
        "temperature_c": temperature,
        "power_w": power,
    }
    now = device.model_copy(update=fields)
    return DeviceReport.model_validate({**now.model_dump(), **fault}) if fault else now
