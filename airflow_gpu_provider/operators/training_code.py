"""What a training runs: the author's function or his script.

Wrong words are refused when the DAG is read, a missing file then or, at the latest, before a GPU is asked
for: the task that asks runs where the script will. Used by `operators.training`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.plan import check_entrypoint
from airflow_gpu_provider.training.script import Script, check_script_file, read_script

if TYPE_CHECKING:
    from airflow_gpu_provider.operators.training import DistributedTrainingOperator


def check_code(
    entrypoint: str | None, script: str | None, script_args: Sequence[object] | str | None
) -> None:
    """Raise InvalidRequest unless exactly one of function and script is given, in words that can be meant."""
    if (entrypoint is None) == (script is None):
        given = "neither" if entrypoint is None else f"both {entrypoint!r} and {script!r}"
        raise InvalidRequest(
            "Give the training as entrypoint='package.module:function' (it survives the loss of a shard "
            f"without a restart) or as script='train.py' (a plain torch script), not {given}."
        )
    if entrypoint is not None:
        check_entrypoint(entrypoint)
        if script_args:
            raise InvalidRequest(
                f"script_args={script_args!r} belong to a script; a function gets train_params={{...}} as "
                "ctx.params."
            )


def script_of(training: DistributedTrainingOperator) -> Script | None:
    """Return the script of a task, None when it has a function instead. Raise InvalidRequest."""
    if training.script is None:
        return None
    return read_script(training.script, training.script_args, dag_folder=dag_folder(training))


def check_file_in_dag_folder(training: DistributedTrainingOperator) -> None:
    """Raise InvalidRequest when a script below the folder of the DAG is missing; others may lie elsewhere."""
    folder = dag_folder(training)
    if training.script is None or folder is None:
        return
    script = read_script(training.script, (), dag_folder=folder)
    if folder in Path(script.target).parents:
        check_script_file(script)


def dag_folder(training: DistributedTrainingOperator) -> Path | None:
    """Return the folder of the DAG file, None for a task that has no DAG yet."""
    return Path(training.dag.fileloc).parent if training.has_dag() else None
