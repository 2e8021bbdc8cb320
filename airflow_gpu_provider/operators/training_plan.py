"""The plan of one attempt: what the author asked for, on the devices that were leased.

Called once the lease is held, since only then the devices are known. Used by `operators.training`; the plan
is read by `training.supervisor` and every shard.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.operators.training_code import script_of
from airflow_gpu_provider.operators.training_root import tries_of
from airflow_gpu_provider.training.elastic import assign_elastic
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.ring import matrix_of, ring_order
from airflow_gpu_provider.training.run_folder import RunFolder
from airflow_gpu_provider.training.shard_range import check_elastic, shard_range
from airflow_gpu_provider.training.slots import Backend, SlotPlan, TrainingShape, assign_slots
from airflow_gpu_provider.training.stream_priority import stream_priority

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_gpu_provider.operators.held_lease import HeldLease
    from airflow_gpu_provider.operators.training import DistributedTrainingOperator
    from airflow_gpu_provider.wire import DeviceView


def plan_training(
    training: DistributedTrainingOperator, context: Context, lease: HeldLease, folder: RunFolder
) -> RunPlan:
    """Return the plan of this try, in a new folder of its own."""
    shape = training.shape(len(lease.devices))
    devices = along_the_ring(lease.devices, lease.latency_ms)
    slots = _slots(training.backend, devices, lease.spares, shape)
    training.log.info("Training in %s; checkpoints in %s", slots.sentence, folder.checkpoints)
    return RunPlan(
        run_id=lease.lease_id,
        run_dir=folder.open_attempt(context["ti"].try_number, tries_of(context)),
        checkpoint_dir=folder.checkpoints,
        entrypoint=training.entrypoint,
        script=script_of(training),
        params=json.loads(json.dumps(params_of(training))),
        shard_count=shape.shards,
        sync_interval=shape.sync_interval,
        network=training.network,
        relay_node=devices[0].node,
        spans_hosts=len({device.host for device in devices}) > 1,
        seed=training.seed,
        backend=slots.backend,
        member_slots=slots.members,
        spare_slots=slots.spares,
        python_path=tuple(entry for entry in sys.path if entry),
        threads_per_shard=threads_per_shard(shape.shards, training.cpu_cores),
        checkpoint_every_s=training.checkpoint_every,
        keep_checkpoints=training.keep_checkpoints,
        allow_non_finite_loss=training.allow_non_finite_loss,
        join_timeout_s=training.join_timeout,
        grow_at=training.grow_at,
        least_devices=shape.elastic.least if shape.elastic else None,
        stream_priority=stream_priority(
            training.stream_priority,
            value=float(training.value or 0),  # not the priority weight, which every task has
            is_shared=any(device.milli < 1000 for device in lease.devices),
        ),
    )


def begin_elastic(training: DistributedTrainingOperator, shard_count: object) -> None:
    """Let a training on a range of devices ask for the least of them, and refuse what cannot be elastic."""
    elastic = shard_range(shard_count)
    if elastic is None:
        return
    is_shared = bool(training.shared or training.share)
    check_elastic(elastic, script=training.script, backend=training.backend, is_shared=is_shared)
    if str(training.gpus) == "1":  # also what is not given
        training.gpus = elastic.least


def along_the_ring(
    devices: Sequence[DeviceView], latency_ms: Mapping[str, Mapping[str, float]]
) -> list[DeviceView]:
    """Return the devices in such an order that ranks follow a ring of low latency, the relay's node first.

    Those of one node stay together and in their order; so do nodes between which nothing was measured.
    """
    nodes = list(dict.fromkeys(device.node for device in devices))
    order = [nodes[place] for place in ring_order(matrix_of(nodes, latency_ms))]
    return sorted(devices, key=lambda device: order.index(device.node))


def is_planned_so(training: DistributedTrainingOperator, plan: RunPlan) -> bool:
    """Say whether a plan that was made earlier is of the training that is asked for now."""
    shape = training.shape(training.build_request().gpus)
    code = (training.entrypoint, script_of(training))
    shards = (shape.shards, shape.sync_interval, training.seed)
    return (
        (plan.entrypoint, plan.script) == code
        and (plan.shard_count, plan.sync_interval, plan.seed) == shards
        and plan.params == json.loads(json.dumps(params_of(training)))
    )


def _slots(
    backend: Backend | Literal["auto"],
    devices: Sequence[DeviceView],
    spares: Sequence[DeviceView],
    shape: TrainingShape,
) -> SlotPlan:
    if shape.elastic is None:
        return assign_slots(devices, spares, shard_count=shape.shards, spares=shape.spares, backend=backend)
    return assign_elastic(devices, shape.elastic, spares=shape.spares)


def params_of(training: DistributedTrainingOperator) -> dict[str, Any]:
    """Return what becomes `ctx.params`. Raise InvalidRequest for what is no mapping once it is rendered."""
    asked, given = training.asked(), training.train_params or {}
    with suppress(ValueError):
        given = json.loads(given) if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        raise InvalidRequest(
            f"train_params={given!r}: give names and plain values, such as {{'steps': 100}}, or a template "
            "that renders to such JSON: '{{ params.training | tojson }}'."
        )
    return {**(asked.dependencies if asked else {}), **given}


def threads_per_shard(shards: int, cpu_cores: object) -> int:
    """Return how many threads each shard computes with: together the cores that were asked."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(float(str(cpu_cores)), here) if cpu_cores else here
    return max(1, int(cores // shards))
