"""The policy hook that carries a run's priority to Airflow's scheduler.

A run's configuration may say `priority` (requirement B1's field); tasks of a backfill run below live work.
Only tasks of this provider are touched, and nothing here ever raises: an error in a policy would keep Airflow
from creating the run. The queue for devices itself is the broker's, see `broker.queue`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from airflow import settings
from airflow.configuration import conf
from airflow.exceptions import AirflowConfigException
from airflow.policies import hookimpl

if TYPE_CHECKING:
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import TaskInstance

_OURS = "airflow_gpu_provider."
_BACKFILL_WEIGHT = 1
_LARGEST = 2**31 - 1  # the column is a 32-bit integer


def _is_on() -> bool:
    try:
        return conf.getboolean("gpu", "priority_hook", fallback=True)
    except AirflowConfigException:  # not a boolean: `Settings.load` names it where somebody reads it
        return False


# Airflow takes a policy for absent unless an `airflow_local_settings` module exists, and then calls it on a
# throw-away task instance only. This says that there is one.
if _is_on():
    settings.task_instance_mutation_hook.is_noop = False  # type: ignore[attr-defined]


@hookimpl
def task_instance_mutation_hook(task_instance: TaskInstance, dag_run: DagRun | None) -> None:
    """Set the priority weight of this provider's tasks."""
    if dag_run is None:  # called from the constructor; the call with the run follows
        return
    module = getattr(getattr(task_instance, "task", None), "_task_module", None) or ""
    if not module.startswith(_OURS) or not _is_on():
        return
    weight = weight_of(dag_run.conf, str(getattr(dag_run.run_type, "value", dag_run.run_type)))
    if weight is not None:
        task_instance.priority_weight = weight


def weight_of(run_conf: Any, run_type: str) -> int | None:
    """Return the weight that a run gives its tasks, None where it says nothing (or nothing usable)."""
    if run_type == "backfill":
        return _BACKFILL_WEIGHT
    priority = run_conf.get("priority") if isinstance(run_conf, dict) else None
    if isinstance(priority, bool) or not isinstance(priority, (int, float)) or not math.isfinite(priority):
        return None
    return max(-_LARGEST, min(_LARGEST, round(priority)))
