"""Start the run of a training on a lease that its task was given.

Invariant: a run that cannot start leaves no lease idle, and nothing is moved in a folder that another
training writes into. Next: `kept_run`, which starts the keeper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_gpu_provider.operators.checkpoint_storage import bring_and_mirror
from airflow_gpu_provider.operators.kept_run import KeptRun
from airflow_gpu_provider.operators.reattachment import remember_run
from airflow_gpu_provider.operators.renewed_meanwhile import renewed_meanwhile
from airflow_gpu_provider.operators.sole_writer import sole_writer
from airflow_gpu_provider.operators.training_plan import plan_training
from airflow_gpu_provider.operators.training_root import training_root, tries_of
from airflow_gpu_provider.training.run_folder import RunFolder

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_gpu_provider.operators.held_lease import HeldLease
    from airflow_gpu_provider.operators.training import DistributedTrainingOperator


def start_run(training: DistributedTrainingOperator, context: Context, held: HeldLease) -> KeptRun:
    """Return the run, with its keeper; give the lease back when it cannot start. Raise FolderInUse."""
    folder = RunFolder(training_root(training.checkpoint_dir, context))
    key, request = training.task_key(context), training.request_body(context)
    try:
        # Waiting for the folder, or for a checkpoint to come, must not cost the lease.
        with renewed_meanwhile(held.view, held.hook), sole_writer(folder.root, key) as guarded:
            plan = plan_training(training, context, held, folder)
            bring_and_mirror(training.checkpoint_dir, plan, tries_of(context), training.log)
            run = KeptRun.start(plan, key, request, held.view, held.hook, guarded)
    except Exception:
        held.release("failed")
        raise
    remember_run(training, context, run)
    return run
