"""From leased devices to one slot per shard process, and how many spare processes there are.

Pure. A shard gets an equal part of the gang's devices. Spares take the lease's spare devices; where it has
none they wait on a member's device, except with NCCL, which refuses two ranks on one GPU: then a lost shard
is started anew on its own device. Used by the operator; the result goes into `plan.RunPlan`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.isolation import LeasedDevice, device_environment
from airflow_gpu_provider.training.plan import Slot
from airflow_gpu_provider.training.shard_range import ShardRange, check_start, shard_range

Backend = Literal["gloo", "nccl"]

#: share of redundant shards while nothing is known of failures
USUAL_REDUNDANCY = 0.10


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Where all processes of a run go, with a sentence for the log."""

    members: tuple[Slot, ...]
    spares: tuple[Slot, ...]
    backend: Backend
    sentence: str


@dataclass(frozen=True, slots=True)
class TrainingShape:
    """How a training is cut."""

    shards: int
    devices_per_shard: int
    sync_interval: int
    spares: int
    elastic: ShardRange | None = None  #: the devices that an elastic run may have; None: always the same


def training_shape(
    gpus: int,
    *,
    shard_count: object,
    sync_interval: object,
    redundancy: object,
    auto: float = USUAL_REDUNDANCY,
) -> TrainingShape:
    """Return the shape that the author's words mean (numbers may come as text), else raise InvalidRequest.

    ``auto`` is the share that "auto" stands for.
    """
    elastic = shard_range(shard_count)
    if elastic is not None:
        check_start(gpus, elastic)
        shards, share = elastic.most, 1
    else:
        shards = gpus if shard_count in (None, "") else _whole("shard_count", shard_count)
        share = devices_per_shard(gpus, shards)
    return TrainingShape(
        shards=shards,
        devices_per_shard=share,
        sync_interval=_whole("sync_interval", sync_interval),
        spares=spare_count(shards, check_redundancy(redundancy), auto),
        elastic=elastic,
    )


def spare_count(shard_count: int, redundancy: float | Literal["auto"], auto: float = USUAL_REDUNDANCY) -> int:
    """Return how many spare shards to keep; a share is rounded up, and of "auto" there is at least one."""
    if redundancy == "auto":
        return max(1, spare_count(shard_count, auto))
    return math.ceil(shard_count * redundancy - 1e-9)  # 0.07 of 100 are 7


def check_redundancy(redundancy: object) -> float | Literal["auto"]:
    """Return a valid ``redundancy``, else raise InvalidRequest."""
    if redundancy == "auto":
        return "auto"
    try:
        share = float(redundancy)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        share = math.nan
    if isinstance(redundancy, bool) or not 0 <= share <= 1:
        raise InvalidRequest(
            f"redundancy={redundancy!r}: allowed are 'auto' (from the failures of earlier runs, 10 % of the "
            "shards while none are known, at least one) or a share from 0 (no spare shard) to 1 (one spare "
            "for each shard)."
        )
    return share


def devices_per_shard(gpu_count: int, shard_count: int) -> int:
    """Return how many devices each shard gets, else raise InvalidRequest."""
    if gpu_count % shard_count:
        raise InvalidRequest(
            f"{gpu_count} GPUs cannot be dealt out evenly to {shard_count} shards; set gpu.count to a "
            f"multiple of shard_count (for example {shard_count * math.ceil(gpu_count / shard_count)}) or "
            "lower shard_count."
        )
    return gpu_count // shard_count


def assign_slots(
    devices: Sequence[LeasedDevice],
    spare_devices: Sequence[LeasedDevice],
    *,
    shard_count: int,
    spares: int,
    backend: Backend | Literal["auto"] = "auto",
) -> SlotPlan:
    """Deal the devices out to ``shard_count`` members and up to ``spares`` spare processes."""
    share = devices_per_shard(len(devices), shard_count)
    members = tuple(slot_on(devices[i * share : (i + 1) * share]) for i in range(shard_count))
    chosen = _backend(backend, members)
    own = min(spares, len(spare_devices) // share)
    spare_slots = [slot_on(spare_devices[i * share : (i + 1) * share]) for i in range(own)]
    sentence = f"{shard_count} shards of {share} device(s), {own} spare(s) on devices of their own, {chosen}"
    if missing := spares - own:
        if chosen == "nccl":
            sentence += (
                f"; {missing} more spare(s) are left out, since NCCL allows one rank per GPU and the lease "
                "has no spare GPU: a lost shard is started anew on its own"
            )
        else:
            spare_slots += [members[index % shard_count] for index in range(missing)]
            sentence += f"; {missing} spare(s) share the members' devices: the lease has none for them"
    return SlotPlan(members, tuple(spare_slots), chosen, sentence)


def _whole(name: str, value: object) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise InvalidRequest(
            f"{name}={value!r}: allowed is a whole number of 1 or more, for example {name}=2."
        )
    return number


def slot_on(devices: Sequence[LeasedDevice]) -> Slot:
    """Return the place of a shard on these devices."""
    is_simulated = any(device.simulated for device in devices)
    return Slot(
        device_ids=tuple(device.id for device in devices),
        environment=device_environment(devices),
        torch_device="cpu" if is_simulated else "cuda:0",
        memory_mib=min(device.memory_limit_mib or device.memory_mib for device in devices),
    )


def _backend(asked: Backend | Literal["auto"], members: Sequence[Slot]) -> Backend:
    has_gpus = all(slot.torch_device != "cpu" for slot in members)
    if asked == "auto":
        return "nccl" if has_gpus else "gloo"
    if asked == "nccl" and not has_gpus:
        raise InvalidRequest(
            "backend='nccl' needs real GPUs and the leased devices are simulated; use backend='auto' or "
            "'gloo'."
        )
    return asked
