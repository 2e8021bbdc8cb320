"""Runs on as many devices as there are: which logical shard is where, and how many devices to have.

Pure. The number of logical shards is fixed, at the most devices that the run may have; with fewer devices
several shards share one, each in a process of its own. Data and randomness follow the shard, so the result is
the same whatever the number of devices was, and whenever it changed. A shard goes elsewhere by a `handover`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from airflow_gpu_provider.training.isolation import LeasedDevice
from airflow_gpu_provider.training.memory_limit import LIMIT_VARIABLE
from airflow_gpu_provider.training.plan import Slot
from airflow_gpu_provider.training.shard_range import ShardRange
from airflow_gpu_provider.training.slots import SlotPlan, slot_on

_LEAST_PAUSE_S = 15.0
_MOST_PAUSE_S = 600.0


@dataclass(frozen=True, slots=True)
class Calm:
    """When a run may take devices: later each time that it had to give back what it had just taken."""

    taken_at: float | None = None
    pause_s: float = 0.0
    until: float = 0.0

    def took(self, now: float) -> Calm:
        """Return it after devices joined."""
        return Calm(now, self.pause_s, self.until)

    def gave_back(self, now: float) -> Calm:
        """Return it after devices went, or did not come to be used."""
        is_soon = self.taken_at is not None and now - self.taken_at < _MOST_PAUSE_S
        pause_s = min(_MOST_PAUSE_S, 2 * self.pause_s) if is_soon and self.pause_s else _LEAST_PAUSE_S
        return Calm(self.taken_at, pause_s, now + pause_s)

    def most(self, held: int, shards: ShardRange, now: float) -> int:
        """Return how many devices to ask for."""
        return shards.most if now >= self.until else held


def kept_devices(devices: Sequence[str], shards: ShardRange, wanted_back: int) -> tuple[str, ...]:
    """Return which of its devices a run keeps while others want so many back: the first ones."""
    return tuple(devices[: max(min(shards.least, len(devices)), len(devices) - wanted_back)])


def spread(shards: int, devices: Sequence[str], at: Mapping[int, str]) -> dict[int, str]:
    """Return the device of each shard: equally many on each, and no more shards move than must."""
    room = {device: shards // len(devices) for device in devices}
    extra = shards % len(devices)
    stays: dict[int, str] = {}
    # A device that is fuller may keep one more, as long as there are odd ones.
    for rank in range(shards):
        device = at.get(rank, "")
        if room.get(device, 0) > 0:
            room[device] -= 1
            stays[rank] = device
    full = {device: 0 for device in devices}
    for rank in range(shards):
        device = at.get(rank, "")
        if rank not in stays and device in full and extra > 0 and full[device] == 0:
            stays[rank], full[device] = device, 1
            extra -= 1
    free = [device for device in devices for _ in range(room[device])]
    free += [device for device in devices if full[device] == 0][:extra]
    moving = (rank for rank in range(shards) if rank not in stays)
    return stays | dict(zip(moving, free, strict=True))


def shared_slot(device: LeasedDevice, sharers: int) -> Slot:
    """Return the place of one of the shards that a device has to bear, with its part of the memory."""
    slot = slot_on([device])
    if sharers == 1 or slot.memory_mib is None:
        return slot
    memory_mib = slot.memory_mib // sharers
    environment = {**slot.environment, LIMIT_VARIABLE: str(memory_mib)}
    return slot.model_copy(update={"memory_mib": memory_mib, "environment": environment})


def elastic_slots(
    devices: Sequence[LeasedDevice],
    shards: ShardRange,
    *,
    spares: Sequence[str | None],
    at: Mapping[int, str] | None = None,
) -> tuple[Slot, ...]:
    """Return the places of all shards by rank, and those of the spares after them.

    ``spares`` and ``at`` say on which device each of them is now; one that is not used counts as none.
    """
    slots = {device.id: shared_slot(device, shards.sharers) for device in devices}
    where, names = spread(shards.most, tuple(slots), at or {}), tuple(slots)
    members = [slots[where[rank]] for rank in range(shards.most)]
    beside = (name if name in slots else names[number % len(names)] for number, name in enumerate(spares))
    return (*members, *(slots[name] for name in beside if name is not None))


def assign_elastic(devices: Sequence[LeasedDevice], shards: ShardRange, *, spares: int) -> SlotPlan:
    """Deal the shards of an elastic run out to the devices that it begins with."""
    slots = elastic_slots(devices, shards, spares=(None,) * spares)
    sentence = (
        f"{shards.most} shards on {shards.least} to {shards.most} devices, now {len(devices)}, up to "
        f"{shards.sharers} on one; {spares} spare(s) share them; gloo, since NCCL allows one rank per GPU"
    )
    return SlotPlan(slots[: shards.most], slots[shards.most :], "gloo", sentence)
