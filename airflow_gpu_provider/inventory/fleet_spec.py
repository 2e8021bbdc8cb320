"""Read the text that describes a simulated fleet.

``2xA100-80GB,2xV100-32GB`` is one node with four devices, ``a:2xA100-80GB;b:2xV100`` are two named nodes,
``64x(8xA100-80GB)`` are 64 equal ones. Without a memory size a device has what its model usually has. Wrong
text is refused with the part that is wrong and an example. The next step is `simulated.SimulatedProbe`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from airflow_gpu_provider.broker.flavors import FLAVORS, Flavor, canonical_model
from airflow_gpu_provider.exceptions import InvalidRequest

EXAMPLES = "2xA100-80GB,2xV100-32GB · node-a:2xA100-80GB;node-b:2xV100-32GB · 64x(8xA100-80GB)"
#: More than any real fleet; guards against a typing error that would fill the memory.
MAX_DEVICES = 100_000

_NODES = re.compile(
    r"(?:(?P<name>[A-Za-z0-9][\w.-]*)\s*:)?\s*(?:(?P<count>\d+)\s*x\s*\((?P<many>[^()]*)\)|(?P<one>[^():]+))"
)
_DEVICES = re.compile(
    r"(?P<count>\d+)\s*[x*]\s*(?P<model>[A-Za-z][A-Za-z0-9 ]*?)(?:-(?P<gib>\d+)\s*Gi?B)?", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A simulated device."""

    model: str
    memory_mib: int
    tflops: float


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A simulated node."""

    name: str
    devices: tuple[DeviceSpec, ...]


def parse_fleet(
    text: str, *, base_name: str, flavors: Mapping[str, Flavor] = FLAVORS
) -> tuple[NodeSpec, ...]:
    """Return the nodes that ``text`` describes; those without a name are called after ``base_name``."""
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if not parts:
        raise _wrong(text, "it is empty")
    nodes: list[NodeSpec] = []
    for position, part in enumerate(parts, start=1):
        match = _NODES.fullmatch(part)
        if match is None:
            raise _wrong(text, f"{part!r} is not [NAME:]DEVICES or [NAME:]COUNTx(DEVICES)")
        own = base_name if len(parts) == 1 else f"{base_name}-{position}"
        name = match["name"] or own
        devices = _devices(text, match["many"] or match["one"] or "", flavors)
        count = int(match["count"] or 1)
        if count < 1:
            raise _wrong(text, f"{part!r} asks for {count} nodes; the least is 1")
        if count * len(devices) > MAX_DEVICES:
            raise _wrong(text, f"{part!r} has more than {MAX_DEVICES} devices")
        names = [name] if match["count"] is None else _numbered(name, count)
        nodes += [NodeSpec(each, devices) for each in names]
    _check_names(text, nodes)
    return tuple(nodes)


def _devices(text: str, part: str, flavors: Mapping[str, Flavor]) -> tuple[DeviceSpec, ...]:
    devices: list[DeviceSpec] = []
    for item in part.split(","):
        match = _DEVICES.fullmatch(item.strip())
        if match is None:
            raise _wrong(text, f"{item.strip()!r} is not COUNTxMODEL or COUNTxMODEL-MEMORYGB")
        count = int(match["count"])
        if not 1 <= count <= MAX_DEVICES:
            raise _wrong(
                text, f"{item.strip()!r} asks for {count} devices; from 1 to {MAX_DEVICES} are possible"
            )
        devices += [_device(text, match["model"], match["gib"], flavors)] * count
    return tuple(devices)


def _device(text: str, name: str, gib: str | None, flavors: Mapping[str, Flavor]) -> DeviceSpec:
    model = canonical_model(name)
    flavor = flavors.get(model)
    if flavor is None:
        raise _wrong(
            text,
            f"{name!r} is no known model; known are {', '.join(sorted(flavors))}, and more can be made known "
            "in [gpu] flavors",
        )
    if gib is not None and int(gib) < 1:
        raise _wrong(text, f"{name}-{gib}GB has no memory")
    # A "80GB" board shows 81920 MiB in NVML: vendors write GB and mean GiB.
    memory_mib = flavor.memory_mib if gib is None else int(gib) * 1024
    return DeviceSpec(model, memory_mib, flavor.rating)


def _numbered(name: str, count: int) -> list[str]:
    width = len(str(count))
    return [f"{name}-{number:0{width}d}" for number in range(1, count + 1)]


def _check_names(text: str, nodes: list[NodeSpec]) -> None:
    seen: set[str] = set()
    for node in nodes:
        if node.name in seen:
            raise _wrong(text, f"the name {node.name!r} is used twice")
        seen.add(node.name)


def _wrong(text: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"The simulated fleet {text!r} cannot be read: {why}. Examples: {EXAMPLES}")
