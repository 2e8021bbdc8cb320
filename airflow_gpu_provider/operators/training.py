"""Train in shards on leased GPUs and survive the loss of some of them.

The operator turns a request into a lease and a plan and hands both to a `keeper`, which trains and outlives
this worker; then it tells the task log what the run does, or waits in the triggerer. The next try goes on
with a run whose worker was lost. Its invariant: no process of the run outlives the lease. A run that ends
without its result leaves checkpoints from which the next try resumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from airflow.sdk.exceptions import AirflowTaskTimeout

from airflow_gpu_provider.broker.model import GpuRequest
from airflow_gpu_provider.callbacks.redundancy import spawn_redundant_shards
from airflow_gpu_provider.exceptions import LeaseLost
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.inventory.host import local_host
from airflow_gpu_provider.operators.die_with_parent import dying_with_parent
from airflow_gpu_provider.operators.hopeless import fail_the_hopeless
from airflow_gpu_provider.operators.kept_run import KeptRun, hook_for_the_end, is_passed_on, is_task_over
from airflow_gpu_provider.operators.lateness import is_late
from airflow_gpu_provider.operators.leased import GpuLeasedOperator
from airflow_gpu_provider.operators.reattachment import (
    ended_well,
    hand_over,
    last_run,
    run_to_go_on_with,
)
from airflow_gpu_provider.operators.redundancy import RedundancyNeeds, look_back
from airflow_gpu_provider.operators.run_start import start_run
from airflow_gpu_provider.operators.script_output import ScriptOutput
from airflow_gpu_provider.operators.training_code import check_code, check_file_in_dag_folder, script_of
from airflow_gpu_provider.operators.training_options import check_options
from airflow_gpu_provider.operators.training_plan import begin_elastic
from airflow_gpu_provider.operators.training_progress import ProgressLog
from airflow_gpu_provider.operators.training_result import training_result
from airflow_gpu_provider.operators.training_root import training_root, tries_of
from airflow_gpu_provider.task_request import TaskRequest, parse_task_request
from airflow_gpu_provider.training.network_options import NetworkOptions, network_options
from airflow_gpu_provider.training.script import check_script_file
from airflow_gpu_provider.training.slots import TrainingShape, training_shape
from airflow_gpu_provider.triggers.training import TrainingTrigger
from airflow_gpu_provider.wire import ClaimBody, LeaseView

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_gpu_provider.operators.held_lease import HeldLease


class DistributedTrainingOperator(GpuLeasedOperator):
    """
    Run ``train(ctx)`` in shards that synchronise every ``sync_interval`` steps, or a plain torch script.

    The XCom holds the final checkpoint, its digests, what happened to shards, and what ``train`` returned on
    shard 0; of a script it holds the folder of its checkpoints and how often it was restarted.

    :param entrypoint: the author's function as "package.module:function"; or else
    :param script: a script as torchrun runs it, "train.py" (beside the DAG file, or an absolute path) or
        "-m package.module"; it is restarted as a whole and goes on from what it saved in AGP_CHECKPOINT_DIR
    :param script_args: the script's arguments, a list (templated)
    :param task_request: the whole request as JSON text or a mapping (templated); it sets GPUs, cores, memory,
        priority, shards and synchronisation, and its dependencies become `ctx.params`
    :param shard_count: number of shards when there is no `task_request`; None: one for each GPU; (2, 4) or
        "2-4": four shards on two to four devices, those beyond two while they are idle
    :param sync_interval: steps between two synchronisations when there is no `task_request`; 1: every step
    :param train_params: plain values for `ctx.params` (templated)
    :param redundancy: share of redundant shards, or "auto": twice the failure rate of such runs, and more
        after a try that lost too many shards. With `on_retry_callback=spawn_redundant_shards` a share grows
        from try to try as well, up to half of the shards.
    :param checkpoint_dir: folder of this training (templated); None: one for each task of each run below
        AIRFLOW_HOME. A folder shared by several runs lets a later run resume an earlier one.
        "s3://connection_id@bucket/path", or another URL, keeps copies there.
    :param checkpoint_every: seconds between two checkpoints
    :param keep_checkpoints: how many of the newest stay
    :param backend: "nccl", "gloo", or "auto": NCCL on GPUs, gloo on CPUs
    :param allow_non_finite_loss: go on when a shard reports a loss that is NaN or infinite
    :param launcher: "local", or "auto" for the same: the worker's own host
    :param network: thresholds and interfaces, such as {"latency_threshold_ms": 20, "sync_interval_max": 400,
        "interfaces": ["eth0", "eth1"]}; None: share up to four times less often where a hop between shards
        takes more than 50 ms
    :param join_timeout: seconds that a shard may take from its start to its loop
    :param grow_at: part of its memory at which a shard asks for more while it trains, as it does when it ran
        out of it: in place, or on idle devices of this host; None: never
    :param stream_priority: "high" puts the function on a CUDA stream that goes first on its device, "normal"
        does not; "auto": high where the device is shared and the task's value is above 0
    :param seed: all randomness follows from it, the step and the shard
    """

    template_fields: Sequence[str] = (
        *GpuLeasedOperator.template_fields,
        "task_request",
        "shard_count",
        "sync_interval",
        "train_params",
        "script_args",
        "redundancy",
        "checkpoint_dir",
    )
    template_fields_renderers = {"task_request": "json", "train_params": "json"}  # noqa: RUF012 - Airflow's
    # The base class builds the request once before these are set.
    task_request: str | Mapping[str, Any] | None = None
    shard_count: int | str | Sequence[int] | None = None
    sync_interval: int | str = 100
    redundancy: float | str = "auto"
    #: what this try has found out of how much redundancy it needs; replaced, never changed
    _needs = RedundancyNeeds()
    #: an earlier try has told what the run did until now
    _has_past = False

    def __init__(
        self,
        *,
        entrypoint: str | None = None,
        script: str | None = None,
        script_args: Sequence[Any] | str | None = None,
        task_request: str | Mapping[str, Any] | None = None,
        shard_count: int | str | Sequence[int] | None = None,
        sync_interval: int | str = 100,
        train_params: Mapping[str, Any] | str | None = None,
        redundancy: float | str = "auto",
        checkpoint_dir: str | None = None,
        checkpoint_every: float = 30.0,
        keep_checkpoints: int = 2,
        backend: Literal["auto", "nccl", "gloo"] = "auto",
        allow_non_finite_loss: bool = False,
        launcher: Literal["auto", "local", "kubernetes"] = "auto",
        network: NetworkOptions | Mapping[str, Any] | None = None,
        join_timeout: float = 1800.0,
        grow_at: float | None = 0.9,
        stream_priority: Literal["auto", "high", "normal"] = "auto",
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_code(entrypoint, script, script_args)
        self.entrypoint = entrypoint
        self.script = script
        self.script_args = script_args
        self.task_request = task_request
        self.shard_count = shard_count
        self.sync_interval = sync_interval
        self.train_params = train_params
        self.redundancy = redundancy
        self.checkpoint_dir = checkpoint_dir
        self.checkpoint_every = checkpoint_every
        self.keep_checkpoints = keep_checkpoints
        self.backend = backend
        self.allow_non_finite_loss = allow_non_finite_loss
        self.launcher = launcher
        self.network = network_options(network)
        self.join_timeout = join_timeout
        self.grow_at = grow_at
        self.stream_priority = stream_priority
        self.seed = seed
        self._found: KeptRun | None = None
        self._following: tuple[KeptRun, LeaseView, GpuBrokerHook] | None = None
        check_options(self)
        check_file_in_dag_folder(self)
        if not any(is_late(getattr(self, name)) for name in self.template_fields):
            script_of(self)
            self.build_request()

    def build_request(self) -> GpuRequest:
        """Return what the task request asks of the broker; raise InvalidRequest that says what to change."""
        if (asked := self.asked()) is not None:
            needs = asked.resource_requirements
            self.gpus, self.model, self.min_tflops = needs.gpu.count, needs.gpu.model, needs.gpu.min_flops
            self.cpu_cores, self.host_memory, self.value = needs.cpu_cores, needs.memory, asked.priority
        begin_elastic(self, asked.shard_count if asked else self.shard_count)
        shape = self.shape(super().build_request().gpus)
        # A shared device has no spares: a lost shard is started anew on its own part.
        # One of an elastic run waits beside the members: a device of its own would rather be a member's.
        self.spares = (
            0 if self.shared or self.share or shape.elastic else shape.spares * shape.devices_per_shard
        )
        return super().build_request()

    def claim_body(self, context: Context) -> ClaimBody:
        """Return what this try asks, with as many spares as history and the try before call for."""
        check_options(self)
        if (script := script_of(self)) is not None:
            check_script_file(script)
        if self._found is not None and self._found.is_alive:  # its lease is passed on for the same only
            body = super().claim_body(context)
            return body.model_copy(update={"request": self._found.where.request, "outlives_worker": True})
        self._needs = self._needs.looked_up(self, context)
        return super().claim_body(context).model_copy(update={"outlives_worker": True})

    @dying_with_parent()
    def execute(self, context: Context) -> Any:
        """Go on with the run of an earlier try where there is one, else ask for devices and start one."""
        with fail_the_hopeless():
            self._found = run_to_go_on_with(self, context)
            if self._found is not None and not self._found.is_alive:
                self.log.info("The training has ended while no worker followed it")
                return self._conclude(context, self._found)
        return super().execute(context)

    @dying_with_parent()
    def conclude(self, context: Context, event: dict[str, Any]) -> Any:
        """Go on after the triggerer waited for the training."""
        with fail_the_hopeless():
            run, hook = last_run(self, context), GpuBrokerHook(self.gpu_conn_id)
            if run is None:
                raise LeaseLost(f"The training was not run on host {local_host()}: {event['why']}.")
            try:
                return self._conclude(context, run)
            except LeaseLost as lost:
                again = self._again(hook, event["claim_id"], run.where.lease_id, lost)
            self._claim_id = again.claim_id
            return self._proceed(context, hook, again, self._deadline())

    def on_kill(self) -> None:
        """Let the shards save and end them when the task is over; let them train on without this worker."""
        if self._following is None or self._following[0].has_ended():
            return super().on_kill()
        run, lease, hook = self._following
        if is_task_over(lease, hook):
            run.stop()
            raise SystemExit("The task was ended from outside: its training is stopped.")
        raise SystemExit(
            f"This worker is being stopped. The training in {run.plan.run_dir} goes on under its lease: the "
            "next try on this host goes on with it."
        )

    def _hold(self, context: Context, held: HeldLease) -> Any:
        """Let a keeper hold the lease and train, and follow that."""
        self._check_host(held)
        # A task that was deferred works in another process than it asked.
        run = self._found or run_to_go_on_with(self, context)
        if run is not None and run.where.lease_id == held.lease_id and run.go_on(held.view, held.hook):
            self.log.info("Going on with the training of an earlier try in %s", run.plan.run_dir)
            self._has_past = True
        elif run is not None and ended_well(run, tries_of(context)):
            held.release("done")
            return self._conclude(context, run)
        else:
            run = self._start(context, held)
        self._following = run, held.view, hook_for_the_end(held.hook)
        if self.deferrable:
            trigger = TrainingTrigger(held.claim_id, self.gpu_conn_id, run.where.identity)
            self.defer(trigger=trigger, method_name="conclude")
        return self._conclude(context, run)

    def _start(self, context: Context, held: HeldLease) -> KeptRun:
        self._needs = self._needs.looked_up(self, context)
        return start_run(self, context, held)

    def _conclude(self, context: Context, run: KeptRun) -> Any:
        """Tell what a run does until it has ended; return what the class says."""
        progress = ProgressLog(run, run.paths, self.log, output=ScriptOutput.of(run.plan, self.log))
        if self._has_past:
            progress.skip_the_past()
        try:
            record = progress.follow()
            run.take_back_orders()
        except AirflowTaskTimeout:
            if self._following is None or not is_passed_on(*self._following):
                run.stop()
            raise
        finally:
            progress.end()
        return hand_over(self, context, run, training_result(run.last_record(record)))

    def asked(self) -> TaskRequest | None:
        """Return the task request, None when the task was given arguments instead."""
        return None if self.task_request is None else parse_task_request(self.task_request)

    def shape(self, gpus: int) -> TrainingShape:
        """Return how a training on so many GPUs is cut into shards, as far as this try knows."""
        asked = self.asked()
        shape = training_shape(
            gpus,
            shard_count=asked.shard_count if asked else self.shard_count,
            sync_interval=asked.sync_interval if asked else self.sync_interval,
            redundancy=self.redundancy,
            auto=self._needs.share,
        )
        return self._needs.at_least(shape)

    @property
    def raises_redundancy(self) -> bool:
        """True when a try that lost too many shards is followed by one with more redundant ones."""
        return self.redundancy == "auto" or spawn_redundant_shards in self.on_retry_callback

    def redundancy_after(self, context: Context) -> str | None:
        """Say with how many redundant shards the next try starts, for `spawn_redundant_shards`."""
        last = look_back(training_root(self.checkpoint_dir, context), self.log)
        return None if last is None else last.sentence(self.shape(self.build_request().gpus).shards)
