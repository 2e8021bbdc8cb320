"""Which live leases hold a device, told to agents: from the board where it is open, else the tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.desk import Desk
from airflow_gpu_provider.store.repository import Repository


class Holder(NamedTuple):
    """A live lease that holds a device or shares it."""

    lease_id: str
    nodes: tuple[str, ...]  #: of all its devices


#: From a device to the leases that hold it.
HoldersOf: TypeAlias = Callable[[str], tuple[Holder, ...]]


def holders_of(desk: Desk, repository: Repository) -> HoldersOf:
    """Return a function from device to the live leases that hold it or share it."""
    if desk.is_open:
        by_device = desk.board.by_device

        def on_board(device: str) -> tuple[Holder, ...]:
            entries = by_device.get(device)
            if entries is None:  # most devices, once a second each
                return ()
            held = (entry.held for entry in entries)
            return tuple(Holder(each.lease_id, each.nodes) for each in held if each is not None)

        return on_board
    held_by: dict[str, tuple[Holder, ...]] = {}
    for lease, _claim in repository.live_leases():
        for device in lease.at_work():
            held_by[device] = (*held_by.get(device, ()), Holder(lease.row.id, lease.nodes))
    return lambda device: held_by.get(device, ())


def held_of(body: ReportBody, holders: HoldersOf) -> list[tuple[str, Holder]]:
    """Return the devices of a report that live leases hold, once for each of the leases."""
    return [
        (device.id, holder) for node in body.nodes for device in node.devices for holder in holders(device.id)
    ]
