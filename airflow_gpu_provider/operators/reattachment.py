"""How a try finds the run that an earlier try of its task has started, and whether it may go on with it.

Airflow's task state store says where that run is, where there is one; else the training's folder does. A run
of another training (other code, parameters or shards: the author changed the DAG in between) is not gone on
with but stopped first: two trainings never write into one folder. Used by `operators.training`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowRuntimeError

from airflow_gpu_provider.operators.checkpoint_storage import with_remote_checkpoint
from airflow_gpu_provider.operators.kept_run import KeptRun
from airflow_gpu_provider.operators.training_plan import is_planned_so
from airflow_gpu_provider.operators.training_root import training_root, tries_of
from airflow_gpu_provider.training.run_folder import RunFolder

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_gpu_provider.operators.training import DistributedTrainingOperator

_STORED_AS = "gpu_training_attempt"


def remember_run(training: DistributedTrainingOperator, context: Context, run: KeptRun) -> None:
    """Let a later try find the run, wherever its templates then say that the training's folder is."""
    store = context.get("task_state_store")
    if store is None:
        return
    try:
        store.set(_STORED_AS, str(run.plan.run_dir))
    except AirflowRuntimeError as error:
        training.log.warning("A retry will look for this run in its folder only: %s", error)


def last_run(training: DistributedTrainingOperator, context: Context) -> KeptRun | None:
    """Return the newest run that a try of this task has started on this host."""
    key = training.task_key(context)
    folder = _stored(training, context) or _folder(training, context)
    # Other tasks may have begun newer ones in a folder that they share.
    return next((run for each in folder.attempts() if (run := KeptRun.find(each, key)) is not None), None)


def run_to_go_on_with(training: DistributedTrainingOperator, context: Context) -> KeptRun | None:
    """Return a run that goes on, or that ended well while no task looked on.

    What is left of any other one is stopped first.
    """
    run = last_run(training, context)
    if run is None:
        return None
    if run.has_ended():
        run.take_back_orders()
    is_same = is_planned_so(training, run.plan)
    if is_same and (run.is_alive or is_undelivered(run, tries_of(context))):
        return run
    if not run.has_ended():
        training.log.info("What is left of the run of an earlier try is stopped first")
        run.stop()
    return None


def ended_well(run: KeptRun, tries: str) -> bool:
    """Stop a run that this try's lease is not for; True: it ended well while the try asked for devices."""
    run.stop()
    return is_undelivered(run, tries)


def is_undelivered(run: KeptRun, tries: str) -> bool:
    """Say whether a run ended well and Airflow did not store its result: no task looked on, or was killed."""
    record = run.record()
    is_success = run.has_ended() and record is not None and record.is_success
    return is_success and not RunFolder.is_over(run.plan.run_dir, tries)


def hand_over(
    training: DistributedTrainingOperator, context: Context, run: KeptRun, ended: dict[str, Any]
) -> dict[str, Any]:
    """Return the XCom of a run that ended well, once all it names is safe, and note who was given it."""
    tries = tries_of(context)
    result = with_remote_checkpoint(ended, training.checkpoint_dir, run.plan, tries, training.log)
    RunFolder.mark_delivered(run.plan.run_dir, json.dumps(result), tries)
    return result


def _folder(training: DistributedTrainingOperator, context: Context) -> RunFolder:
    return RunFolder(training_root(training.checkpoint_dir, context))


def _stored(training: DistributedTrainingOperator, context: Context) -> RunFolder | None:
    store = context.get("task_state_store")
    if store is None:
        return None
    try:
        stored = store.get(_STORED_AS)
    except AirflowRuntimeError as error:
        training.log.warning("An earlier run is looked for in the training's folder: %s", error)
        return None
    if not stored or not Path(str(stored)).is_dir():
        return None
    # A newer attempt may have begun whose task was killed before it could say so.
    return RunFolder(Path(str(stored)).parent.parent)
