"""What differs between two reports of a fleet: load, availability, artifacts, latency of some nodes, or more.

Reports come each second and nearly always say the same, so a node that is the same object is not looked
into. The next step is `engine.Engine.set_fleet`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter

from airflow_gpu_provider.broker.model import Device, Fleet, Node

#: What changes from second to second; whatever else a node or device has is what it is.
_OF_NODE = ("load", "unavailable", "devices", "artifacts", "latency_ms")
_OF_DEVICE = ("utilisation", "memory_used_mib", "unavailable")

_lasting_of_node = attrgetter(*(each.name for each in fields(Node) if each.name not in _OF_NODE))
_lasting_of_device = attrgetter(*(each.name for each in fields(Device) if each.name not in _OF_DEVICE))


def changed_nodes(before: tuple[Node, ...], now: Fleet) -> dict[int, Node] | None:
    """Return the nodes that are not quite as they were, by their number in ``before``.

    ``before`` is sorted by name. None = more than that changed.
    """
    after = sorted(now.nodes, key=attrgetter("name"))
    if len(after) != len(before):
        return None
    changed = {}
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        if new is old:
            continue
        if not _is_alike(old, new):
            return None
        if _state(old) != _state(new):
            changed[number] = new
    return changed


def is_other_offer(before: tuple[Node, ...], changed: Mapping[int, Node]) -> bool:
    """Return whether nodes or devices failed or came back, and not load and artifacts alone are new."""
    return any(_offer(before[number]) != _offer(node) for number, node in changed.items())


def _is_alike(old: Node, new: Node) -> bool:
    if _lasting_of_node(old) != _lasting_of_node(new):
        return False
    return list(map(_lasting_of_device, old.devices)) == list(map(_lasting_of_device, new.devices))


def _state(node: Node) -> tuple[object, ...]:
    return node.load, node.artifacts, node.latency_ms, _offer(node)


def _offer(node: Node) -> tuple[object, ...]:
    return node.unavailable, [device.unavailable for device in node.devices]
