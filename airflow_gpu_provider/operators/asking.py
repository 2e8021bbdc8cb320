"""What a task asks of the broker: the arguments of every operator that holds GPUs.

What can be known to be wrong is refused when the DAG file is parsed, or as soon as its templates are
rendered. The next step is `leased`, which waits for the devices and holds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_gpu_provider.broker.model import GpuRequest, RunType
from airflow_gpu_provider.broker.request import build_request
from airflow_gpu_provider.hooks.broker import DEFAULT_CONN_ID
from airflow_gpu_provider.inventory.host import local_host
from airflow_gpu_provider.operators.asking_checks import (
    check_artifacts,
    check_given_model,
    check_name,
    check_queue_timeout,
    check_value,
)
from airflow_gpu_provider.operators.lateness import is_late
from airflow_gpu_provider.operators.run_progress import completes
from airflow_gpu_provider.wire import MOST_NAME, ClaimBody, RequestBody, TaskKey

if TYPE_CHECKING:
    from airflow.sdk import Context


class GpuAskingOperator(BaseOperator):
    """
    Know which GPUs a task needs.

    :param gpus: number of devices, all or none
    :param memory: memory of each device, e.g. "8GiB"; of a shared device, what the task needs of it
    :param shared: be content with a part of a device beside other tasks, as much of it as `memory` is
    :param share: the least part of a shared device, above 0 and below 1, e.g. 0.25; `shared` goes without
        saying
    :param model: GPU model or models that will do, e.g. "A100" or "A100|H100"; None: any
    :param min_tflops: compute asked of each device; weaker ones are a fallback unless `strict`
    :param strict: refuse devices weaker than `min_tflops`
    :param cpu_cores: CPU cores on the devices' nodes, for the whole task
    :param host_memory: main memory on the devices' nodes, for the whole task
    :param spares: devices to add when idle, never waited for
    :param value: business value, higher is sooner; None: the task's priority weight
    :param team: whose quota the devices count on, see `[gpu] quotas`; None: of no team
    :param preemptible: the devices may be taken back for work of more value; the task then asks again
    :param task_class: what kind of work it is, for what is learned of such work; None: the DAG and the task
    :param artifacts: pretrained models and data sets it reads, by path or digest; nodes that hold them are
        preferred
    :param require_artifacts: only nodes that hold all of `artifacts`
    :param node_labels: labels that a node must have, e.g. {"zone": "hall-1"}; agents say them
    :param tolerates: taints of nodes that do not keep it off, e.g. ["lab"]; "*": all
    :param queue_timeout: longest time to wait for devices, seconds or timedelta; None: no limit
    :param max_runtime: promised longest run, seconds or timedelta; lets the task pass a blocked larger one
    :param gpu_conn_id: connection of type `gpu`
    """

    template_fields: Sequence[str] = (
        "gpus",
        "memory",
        "share",
        "model",
        "min_tflops",
        "cpu_cores",
        "host_memory",
        "spares",
        "value",
        "team",
        "task_class",
        "artifacts",
        "node_labels",
        "tolerates",
    )

    def __init__(
        self,
        *,
        gpus: int | str = 1,
        memory: str | None = None,
        shared: bool = False,
        share: float | str | None = None,
        model: str | Sequence[str] | None = None,
        min_tflops: float | str | None = None,
        strict: bool = False,
        cpu_cores: float | str | None = None,
        host_memory: str | None = None,
        spares: int | str = 0,
        value: float | str | None = None,
        queue_timeout: timedelta | float | None = None,
        max_runtime: timedelta | float | None = None,
        team: str | None = None,
        preemptible: bool = False,
        task_class: str | None = None,
        artifacts: str | Sequence[str] | None = None,
        require_artifacts: bool = False,
        node_labels: Mapping[str, str] | str | Sequence[str] | None = None,
        tolerates: str | Sequence[str] | None = None,
        gpu_conn_id: str = DEFAULT_CONN_ID,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.gpus = gpus
        self.memory = memory
        self.shared = shared
        self.share = share
        self.model = model
        self.min_tflops = min_tflops
        self.strict = strict
        self.cpu_cores = cpu_cores
        self.host_memory = host_memory
        self.spares = spares
        self.value = value
        self.queue_timeout = queue_timeout
        self.max_runtime = max_runtime
        self.gpu_conn_id = gpu_conn_id
        self.team = team
        self.preemptible = preemptible
        self.task_class = task_class
        self.artifacts = artifacts
        self.require_artifacts = require_artifacts
        self.node_labels = node_labels
        self.tolerates = tolerates
        check_queue_timeout(queue_timeout)
        check_given_model(model)
        if not self._has_templates():
            self.build_request()

    def build_request(self) -> GpuRequest:
        """Return what is asked of the broker; raise InvalidRequest that says what to change."""
        check_value(self.value)
        check_name("team", self.team)
        check_name("task_class", self.task_class, longest=None)  # `class_of` shortens it
        check_artifacts(self.artifacts)
        return build_request(
            gpus=self.gpus,
            memory=self.memory,
            shared=self.shared,
            share=self.share,
            model=self.model,
            min_tflops=self.min_tflops,
            strict=self.strict,
            cpu_cores=self.cpu_cores,
            host_memory=self.host_memory,
            host=local_host(),
            spares=self.spares,
            max_runtime=seconds_of(self.max_runtime),
            task_class=self.task_class,
            artifacts=self.artifacts,
            artifacts_required=self.require_artifacts,
            node_labels=self.node_labels,
            tolerates=self.tolerates,
        )

    def claim_body(self, context: Context) -> ClaimBody:
        """Return what this try asks; raise InvalidRequest or ValidationError where it is wrong."""
        ti, dag_run = context["ti"], context["dag_run"]
        is_backfill = str(getattr(dag_run.run_type, "value", dag_run.run_type)) == "backfill"
        return ClaimBody(
            key=self.task_key(context),
            request=self.request_body(context),
            value=self._value(),
            run_type=RunType.BACKFILL if is_backfill else RunType.LIVE,
            team=self.team or None,
            preemptible=self.preemptible,
            completes=completes(ti),
            ti_id=str(ti.id),
            owner=self.owner,
        )

    def request_body(self, context: Context) -> RequestBody:
        """Return which devices this try asks for."""
        task_class = self.class_of(context["ti"])
        return RequestBody.from_request(replace(self.build_request(), task_class=task_class))

    def task_key(self, context: Context) -> TaskKey:
        """Return the name of this try at the broker."""
        ti = context["ti"]
        return TaskKey(
            dag_id=ti.dag_id,
            run_id=ti.run_id,
            task_id=ti.task_id,
            map_index=-1 if ti.map_index is None else ti.map_index,
            try_number=ti.try_number,
        )

    def class_of(self, ti: Any) -> str:
        """Return what kind of work this is: what was named, else the DAG and the task."""
        named = self.task_class or f"{ti.dag_id}.{ti.task_id}"
        if len(named) <= MOST_NAME:
            return named
        digest = hashlib.sha256(named.encode()).hexdigest()[:12]  # the names of Airflow may be longer
        return f"{named[: MOST_NAME - len(digest) - 1]}~{digest}"

    def _value(self) -> float:
        return check_value(self.priority_weight if self.value is None else self.value) or 0.0

    def _has_templates(self) -> bool:
        """Tell whether an argument is only known when the task runs."""
        return any(is_late(getattr(self, name)) for name in GpuAskingOperator.template_fields)


def seconds_of(value: timedelta | float | None) -> float | None:
    """Return a length of time in seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else value
