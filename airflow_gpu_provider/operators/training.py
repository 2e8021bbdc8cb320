"""Train in shards on leased GPUs and survive the loss of some of them.

The operator turns a request into a lease and a plan, starts a supervisor through a launcher and tells the
task log what that does; the training itself is in `training`. Its invariant: no process of the run outlives
the lease. A try that fails leaves checkpoints from which the next try resumes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from airflow.sdk.exceptions import AirflowFailException

from airflow_gpu_provider.broker.model import GpuRequest
from airflow_gpu_provider.callbacks.redundancy import spawn_redundant_shards
from airflow_gpu_provider.exceptions import LeaseLost, LeasePreempted, WorkerGroupFailed
from airflow_gpu_provider.launchers.base import TrainingRun
from airflow_gpu_provider.launchers.local import LocalLauncher
from airflow_gpu_provider.operators.leased import GpuLeasedOperator
from airflow_gpu_provider.operators.redundancy import auto_redundancy, look_back
from airflow_gpu_provider.operators.training_progress import ProgressLog, end_run, failed_on
from airflow_gpu_provider.task_request import TaskRequest, parse_task_request
from airflow_gpu_provider.training.next_try import LastTry, note_lost_lease
from airflow_gpu_provider.training.plan import RunPlan, check_entrypoint
from airflow_gpu_provider.training.run_file import RunRecord, RunState
from airflow_gpu_provider.training.run_folder import RunFolder, folder_name
from airflow_gpu_provider.training.slots import (
    USUAL_REDUNDANCY,
    TrainingShape,
    assign_slots,
    training_shape,
)
from airflow_gpu_provider.wire import ClaimBody

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_gpu_provider.operators.held_lease import HeldLease


class DistributedTrainingOperator(GpuLeasedOperator):
    """
    Run ``train(ctx)`` in shards that synchronise every ``sync_interval`` steps.

    The XCom holds the final checkpoint, its digests, what happened to shards, and what ``train`` returned on
    shard 0.

    :param entrypoint: the author's function as "package.module:function"
    :param task_request: the whole request as JSON text or a mapping (templated); it sets GPUs, cores, memory,
        priority, shards and synchronisation, and its dependencies become `ctx.params`
    :param shard_count: number of shards when there is no `task_request`; None: one for each GPU
    :param sync_interval: steps between two synchronisations when there is no `task_request`; 1: every step
    :param train_params: plain values for `ctx.params` (templated)
    :param redundancy: share of redundant shards, or "auto": twice the failure rate of such runs, and more
        after a try that lost too many shards. With `on_retry_callback=spawn_redundant_shards` a share grows
        from try to try as well, up to half of the shards.
    :param checkpoint_dir: folder of this training (templated); None: one for each task of each run below
        AIRFLOW_HOME. A folder shared by several runs lets a later run resume an earlier one.
    :param checkpoint_every: seconds between two checkpoints
    :param backend: "nccl", "gloo", or "auto": NCCL on GPUs, gloo on CPUs
    :param allow_non_finite_loss: go on when a shard reports a loss that is NaN or infinite
    :param seed: all randomness follows from it, the step and the shard
    """

    template_fields: Sequence[str] = (
        *GpuLeasedOperator.template_fields,
        "task_request",
        "shard_count",
        "sync_interval",
        "train_params",
        "redundancy",
        "checkpoint_dir",
    )
    template_fields_renderers = {"task_request": "json", "train_params": "json"}  # noqa: RUF012 - Airflow's
    # The base class builds the request once before these are set.
    task_request: str | Mapping[str, Any] | None = None
    shard_count: int | str | None = None
    sync_interval: int | str = 100
    redundancy: float | str = "auto"
    #: what "auto" stands for in this try; None = not asked yet
    _auto: float | None = None
    #: what became of the try before, when this try's redundancy follows it
    _last_try: LastTry | None = None
    _looked_back = False

    def __init__(
        self,
        *,
        entrypoint: str,
        task_request: str | Mapping[str, Any] | None = None,
        shard_count: int | str | None = None,
        sync_interval: int | str = 100,
        train_params: Mapping[str, Any] | None = None,
        redundancy: float | str = "auto",
        checkpoint_dir: str | None = None,
        checkpoint_every: float = 30.0,
        backend: Literal["auto", "nccl", "gloo"] = "auto",
        allow_non_finite_loss: bool = False,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.entrypoint = check_entrypoint(entrypoint)
        self.task_request = task_request
        self.shard_count = shard_count
        self.sync_interval = sync_interval
        self.train_params = dict(train_params or {})
        self.redundancy = redundancy
        self.checkpoint_dir = checkpoint_dir
        self.checkpoint_every = checkpoint_every
        self.backend = backend
        self.allow_non_finite_loss = allow_non_finite_loss
        self.seed = seed
        self._run: TrainingRun | None = None
        if not any(_is_late(getattr(self, name)) for name in self.template_fields):
            self.build_request()

    def build_request(self) -> GpuRequest:
        """Return what the task request asks of the broker; raise InvalidRequest that says what to change."""
        if (asked := self._asked()) is not None:
            needs = asked.resource_requirements
            self.gpus, self.model, self.min_tflops = needs.gpu.count, needs.gpu.model, needs.gpu.min_flops
            self.cpu_cores, self.host_memory, self.value = needs.cpu_cores, needs.memory, asked.priority
        shape = self._shape(super().build_request().gpus)
        # A shared device has no spares: a lost shard is started anew on its own part.
        self.spares = 0 if self.shared or self.share else shape.spares * shape.devices_per_shard
        return super().build_request()

    def claim_body(self, context: Context) -> ClaimBody:
        """Return what this try asks, with as many spares as history and the try before call for."""
        self._ask_history(context)
        self._follow_last_try(context)
        return super().claim_body(context)

    def run_leased(self, context: Context, lease: HeldLease) -> Any:
        """Train on the leased devices; return what the class says."""
        # A task that was deferred works in another process than it asked.
        self._ask_history(context)
        self._follow_last_try(context)
        folder = RunFolder(training_root(self.checkpoint_dir, context))
        plan = self._plan(context, lease, folder)
        self._run = LocalLauncher().start(plan)
        progress = ProgressLog(self._run, plan.paths, self.log)
        try:
            record = progress.follow(lease)
        except LeaseLost as lost:
            if not isinstance(lost, LeasePreempted):  # else the shards may still save
                self._run.kill()
            note_lost_lease(plan.run_dir, lost.message)
            raise
        finally:
            end_run(self._run)
        for device_id in record.suspect_devices:
            lease.report_failed_device(device_id)
        if (measured := progress.measured()) is not None:
            steps, seconds = measured
            lease.report_work(steps * plan.shard_count, seconds=seconds)
        lease.report_shards(plan.shard_count, failed_on=failed_on(record, plan, lease))
        result = training_result(record)
        folder.mark_delivered(json.dumps(result))
        return result

    def on_kill(self) -> None:
        """Let the shards save, end them, then give the devices back."""
        if self._run is not None:
            self._run.stop()
        super().on_kill()

    def _plan(self, context: Context, lease: HeldLease, folder: RunFolder) -> RunPlan:
        asked, shape = self._asked(), self._shape(len(lease.devices))
        slots = assign_slots(
            lease.devices,
            lease.spares,
            shard_count=shape.shards,
            spares=shape.spares,
            backend=self.backend,
        )
        self.log.info("Training in %s; checkpoints in %s", slots.sentence, folder.checkpoints)
        return RunPlan(
            run_id=lease.lease_id,
            run_dir=folder.open_attempt(context["ti"].try_number),
            checkpoint_dir=folder.checkpoints,
            entrypoint=self.entrypoint,
            params={**(asked.dependencies if asked else {}), **self.train_params},
            shard_count=shape.shards,
            sync_interval=shape.sync_interval,
            seed=self.seed,
            backend=slots.backend,
            member_slots=slots.members,
            spare_slots=slots.spares,
            python_path=tuple(entry for entry in sys.path if entry),
            threads_per_shard=threads_per_shard(shape.shards, self.cpu_cores),
            checkpoint_every_s=self.checkpoint_every,
            allow_non_finite_loss=self.allow_non_finite_loss,
        )

    def _asked(self) -> TaskRequest | None:
        return None if self.task_request is None else parse_task_request(self.task_request)

    def _shape(self, gpus: int) -> TrainingShape:
        asked = self._asked()
        shape = training_shape(
            gpus,
            shard_count=asked.shard_count if asked else self.shard_count,
            sync_interval=asked.sync_interval if asked else self.sync_interval,
            redundancy=self.redundancy,
            auto=USUAL_REDUNDANCY if self._auto is None else self._auto,
        )
        if self._last_try is None:
            return shape
        return replace(shape, spares=max(shape.spares, self._last_try.spares_now(shape.shards)))

    def _ask_history(self, context: Context) -> None:
        """Let the broker say what "auto" stands for; never when the DAG is only read."""
        if self.redundancy != "auto" or self._auto is not None:
            return
        models = self.build_request().models
        self._auto = auto_redundancy(
            self.gpu_conn_id,
            self.class_of(context["ti"]),
            next(iter(models)) if len(models) == 1 else None,
            self.log,
        )

    @property
    def raises_redundancy(self) -> bool:
        """True when a try that lost too many shards is followed by one with more redundant ones."""
        return self.redundancy == "auto" or spawn_redundant_shards in self.on_retry_callback

    def redundancy_after(self, context: Context) -> str | None:
        """Say with how many redundant shards the next try starts, for `spawn_redundant_shards`."""
        last = look_back(training_root(self.checkpoint_dir, context), self.log)
        return None if last is None else last.sentence(self._shape(self.build_request().gpus).shards)

    def _follow_last_try(self, context: Context) -> None:
        """Look once, in a retry, at what the try before left, whatever ended it."""
        if self._looked_back or context["ti"].try_number <= 1 or not self.raises_redundancy:
            return
        self._looked_back = True
        self._last_try = look_back(training_root(self.checkpoint_dir, context), self.log)
        if self._last_try is not None:
            shards = self._shape(self.build_request().gpus).shards
            self.log.info("%s", self._last_try.sentence(shards))


def training_result(record: RunRecord) -> dict[str, Any]:
    """Return the XCom of a run that succeeded; raise what tells Airflow whether to retry otherwise."""
    if record.state is not RunState.SUCCEEDED or record.checkpoint is None:
        failures = {f.rank: f.sentence for f in record.failures if f.rank is not None}
        error = WorkerGroupFailed(
            f"The training ended {record.state.value}: {record.error}",
            reason=record.unreplaced[-1].cause.value if record.unreplaced else record.state.value,
            failures=failures,
        )
        if record.hopeless:
            raise AirflowFailException(f"{error.message} [{error.reason}]") from error
        raise error
    return {
        "checkpoint": record.checkpoint.path,
        "sha256": record.checkpoint.sha256,
        "state_sha256": record.checkpoint.state_sha256,
        "steps": record.step_count,
        "resumed_from": record.resumed_from,
        "takeovers": record.takeovers,
        "result": record.result,
    }


def threads_per_shard(shards: int, cpu_cores: object) -> int:
    """Return how many threads each shard computes with: together the cores that were asked."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(float(str(cpu_cores)), here) if cpu_cores else here
    return max(1, int(cores // shards))


def training_root(checkpoint_dir: str | None, context: Context) -> Path:
    """Return the training's folder: the author's, else one for this task of this run below AIRFLOW_HOME."""
    if checkpoint_dir:
        return Path(checkpoint_dir).expanduser().absolute()
    from airflow.configuration import AIRFLOW_HOME

    ti = context["ti"]
    parts = [ti.dag_id, ti.run_id, ti.task_id]
    if ti.map_index is not None and ti.map_index >= 0:
        parts.append(str(ti.map_index))
    return Path(AIRFLOW_HOME, "gpu_training", *(folder_name(part) for part in parts))


def _is_late(value: object) -> bool:
    """Say whether a value is only known when the task runs."""
    return hasattr(value, "resolve") or "{{" in str(value)
