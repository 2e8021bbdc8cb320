"""Where a training lies on disk: the author's folder, else one for each task of each run.

Every try of a task finds the same folder, which is how it finds what earlier tries left. Used by
`operators.training`; what lies in it is said by `training.run_folder`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.run_folder import folder_name

if TYPE_CHECKING:
    from airflow.sdk import Context


def is_url(checkpoint_dir: str | None) -> TypeGuard[str]:
    """Say whether a ``checkpoint_dir`` names an object storage, to which checkpoints are copied."""
    return isinstance(checkpoint_dir, str) and "://" in checkpoint_dir


def check_checkpoints(checkpoint_dir: str | None, keep: int, script: str | None) -> int:
    """Return how many checkpoints are kept. Raise InvalidRequest for what can never be."""
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise InvalidRequest(f"keep_checkpoints={keep!r}: give a whole number >= 1; 2 keeps one in reserve.")
    if script is not None and is_url(checkpoint_dir):
        raise InvalidRequest(
            f"checkpoint_dir={checkpoint_dir!r} with a script: a script writes its own files, so give a "
            "folder; or let the script save to the storage itself."
        )
    return keep


def tries_of(context: Context) -> str:
    """Return the name of a round of tries: a retry shares it with the try before, a cleared task does not.

    Airflow raises ``max_tries`` when a task is cleared, and never between two tries.
    """
    ti = context["ti"]
    return json.dumps([ti.dag_id, ti.run_id, ti.task_id, ti.map_index, ti.max_tries])


def training_root(checkpoint_dir: str | None, context: Context) -> Path:
    """Return the training's folder: the author's, else one for this task of this run below AIRFLOW_HOME."""
    if checkpoint_dir and not is_url(checkpoint_dir):
        return Path(checkpoint_dir).expanduser().absolute()
    from airflow.configuration import AIRFLOW_HOME

    ti = context["ti"]
    parts = [ti.dag_id, ti.run_id, ti.task_id]
    if ti.map_index is not None and ti.map_index >= 0:
        parts.append(str(ti.map_index))
    return Path(AIRFLOW_HOME, "gpu_training", *(folder_name(part) for part in parts))
