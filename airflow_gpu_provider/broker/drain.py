"""Take nodes and devices out of service on a person's word, and say whose and why.

A drain is a person's wish; health and staleness are facts that agents report. Both make a device unavailable,
and both stay visible: undraining a faulty device does not make it healthy. Leases that hold drained devices
go on. The next step is the fleet that `cycle.decide` sees.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum

from airflow_gpu_provider.broker.model import Device, Fleet, Node


class DrainScope(str, Enum):
    """What is drained."""

    NODE = "node"
    """A node with all its devices, those included that appear later."""
    DEVICE = "device"
    """One device, on whatever node it is."""


@dataclass(frozen=True, slots=True)
class Drain:
    """A node or device that nobody shall be given, from ``since`` until it is undrained or ``until``."""

    scope: DrainScope
    target: str
    reason: str
    by: str
    since: datetime
    until: datetime | None = None

    def __str__(self) -> str:
        # Without its age: the sentence becomes part of reasons that are written only where they change.
        end = "" if self.until is None else f" until {self.until:%Y-%m-%d %H:%M UTC}"
        return f"drained by {self.by}{end}: {self.reason}"


def with_drains(fleet: Fleet, drains: Iterable[Drain], now: datetime) -> Fleet:
    """Return the fleet with what is drained now unavailable; other nodes stay the same objects."""
    active: dict[tuple[DrainScope, str], Drain] = {}
    for drain in sorted(drains, key=lambda each: each.since):
        if drain.since <= now and (drain.until is None or now < drain.until):
            active[drain.scope, drain.target] = drain
    if not active:
        return fleet
    return Fleet(tuple(_node(node, active) for node in fleet.nodes))


def _node(node: Node, active: dict[tuple[DrainScope, str], Drain]) -> Node:
    devices = tuple(_device(device, active) for device in node.devices)
    drain = active.get((DrainScope.NODE, node.name))
    if drain is None and devices == node.devices:
        return node
    return replace(node, devices=devices, unavailable=_both(drain, node.unavailable))


def _device(device: Device, active: dict[tuple[DrainScope, str], Drain]) -> Device:
    drain = active.get((DrainScope.DEVICE, device.id))
    if drain is None:
        return device
    return replace(device, unavailable=_both(drain, device.unavailable))


def _both(drain: Drain | None, fact: str | None) -> str | None:
    if drain is None:
        return fact
    return str(drain) if fact is None else f"{drain}; {fact}"
