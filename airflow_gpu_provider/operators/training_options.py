"""Whether the options of a training can be meant, known before any device is asked for.

`operators.training` has them checked when the DAG is read, and once more when their templates are rendered:
what passes here makes a `RunPlan`. Values that are only known later are left alone until then. What the code
of a training may be is in `training_code`; the numbers of its shards are checked with the request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.launchers.choice import check_launcher
from airflow_gpu_provider.operators.lateness import is_late
from airflow_gpu_provider.operators.training_plan import params_of
from airflow_gpu_provider.operators.training_root import check_checkpoints, is_url
from airflow_gpu_provider.training.plan import check_grow_at
from airflow_gpu_provider.training.stream_priority import check_priority

if TYPE_CHECKING:
    from airflow_gpu_provider.operators.training import DistributedTrainingOperator

_BACKENDS = ("auto", "nccl", "gloo")
_PLAIN = "texts, whole and finite numbers, True, False, None, lists and mappings of them"


def check_options(training: DistributedTrainingOperator) -> None:
    """Raise InvalidRequest, saying what is allowed, for an option that no training can have."""
    if training.backend not in _BACKENDS:
        raise InvalidRequest(
            f"backend={training.backend!r}: allowed are 'nccl', 'gloo', and 'auto' (NCCL on GPUs, gloo on "
            "CPUs)."
        )
    if not isinstance(training.allow_non_finite_loss, bool):
        raise InvalidRequest(
            f"allow_non_finite_loss={training.allow_non_finite_loss!r}: allowed are True and False."
        )
    if isinstance(training.seed, bool) or not isinstance(training.seed, int):
        raise InvalidRequest(f"seed={training.seed!r}: allowed is a whole number, for example seed=1.")
    _check_seconds("checkpoint_every", training.checkpoint_every, least="0 or more", example=30)
    _check_seconds("join_timeout", training.join_timeout, least="above 0", example=1800)
    check_grow_at(training.grow_at)
    check_launcher(training.launcher)
    check_priority(training.stream_priority)
    check_checkpoints(training.checkpoint_dir, training.keep_checkpoints, training.script)
    _check_folder(training.checkpoint_dir)
    check_params(training)


def check_params(training: DistributedTrainingOperator) -> None:
    """Raise InvalidRequest unless parameters can be handed to every shard as JSON, or come later."""
    known: object = training.train_params
    if not is_late(known) and not is_late(training.task_request):
        known = params_of(training)
    if (wrong := _unplain(known, "train_params")) is not None:
        raise InvalidRequest(f"{wrong}: allowed are {_PLAIN}. Let `train` make the rest of them.")


def _unplain(value: object, name: str) -> str | None:
    """Return the first part that JSON cannot tell, None when there is none."""
    if isinstance(value, Mapping):
        if (key := next((key for key in value if not isinstance(key, str)), None)) is not None:
            return f"{name} has the key {key!r}, which is no text"
        parts = [(each, f"{name}[{key!r}]") for key, each in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(each, f"{name}[{number}]") for number, each in enumerate(value)]
    elif isinstance(value, float) and not math.isfinite(value):
        return f"{name} is {value!r}, which JSON does not have"
    elif value is None or isinstance(value, str | int | float) or is_late(value):
        return None
    else:
        return f"{name} is {value!r}, a {type(value).__name__}"
    return next((wrong for part in parts if (wrong := _unplain(*part)) is not None), None)


def _check_seconds(name: str, value: object, *, least: str, example: int) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and (value > 0 or (value == 0 and least == "0 or more")):  # type: ignore[operator]
        return
    raise InvalidRequest(
        f"{name}={value!r}: allowed is a number of seconds, {least}, for example {name}={example}."
    )


def _check_folder(checkpoint_dir: object) -> None:
    """Refuse a relative path: it would be below whatever folder the worker was started in."""
    if not checkpoint_dir or is_late(checkpoint_dir):
        return
    if not isinstance(checkpoint_dir, str | Path):
        raise InvalidRequest(
            f"checkpoint_dir={checkpoint_dir!r} is no path: give a text, such as '/data/training'."
        )
    text = str(checkpoint_dir)
    if is_url(text) or text.startswith("~") or Path(text).is_absolute():
        return
    raise InvalidRequest(
        f"checkpoint_dir={text!r} is relative to nothing that all tries share: give an absolute path, "
        f"such as '/data/{text}', a URL of an object storage, or leave it out for a folder of the run below "
        "AIRFLOW_HOME."
    )
