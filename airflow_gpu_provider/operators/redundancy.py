"""How much redundancy a try gets: by the broker's history, and by what became of the try before.

``redundancy="auto"`` asks the broker, whose history knows how often shards fail. A training must start
without it too: a broker that does not answer, or does not know the question, leaves the usual share, and a
folder that cannot be read raises nothing. Used by `operators.training`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_gpu_provider.exceptions import GpuProviderError
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.inventory.host import local_host
from airflow_gpu_provider.operators.training_root import training_root
from airflow_gpu_provider.training.next_try import LastTry, last_try
from airflow_gpu_provider.training.run_folder import RunFolder
from airflow_gpu_provider.training.slots import USUAL_REDUNDANCY, TrainingShape

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.types import Logger

    from airflow_gpu_provider.operators.training import DistributedTrainingOperator

#: The answer is worth little: whoever waits for devices need not wait for it.
_PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class RedundancyNeeds:
    """What one try has found out; without looking, what is usual. Never looked up when a DAG is only read."""

    #: what "auto" stands for; None = not asked yet
    auto: float | None = None
    #: what became of the try before, when this try's redundancy follows it
    last_try: LastTry | None = None
    looked_back: bool = False

    @property
    def share(self) -> float:
        """The share of redundant shards that "auto" stands for."""
        return USUAL_REDUNDANCY if self.auto is None else self.auto

    def at_least(self, shape: TrainingShape) -> TrainingShape:
        """Return the shape with the redundant shards that the try before lacked."""
        if self.last_try is None:
            return shape
        return replace(shape, spares=max(shape.spares, self.last_try.spares_now(shape.shards)))

    def looked_up(self, training: DistributedTrainingOperator, context: Context) -> RedundancyNeeds:
        """Ask the broker's history and look, in a retry, at what the try before left, whatever ended it.

        Each only once, and only where the task's redundancy follows it.
        """
        found = self
        if training.redundancy == "auto" and found.auto is None:
            models = training.build_request().models
            model = next(iter(models)) if len(models) == 1 else None
            task_class = training.class_of(context["ti"])
            share = auto_redundancy(training.gpu_conn_id, task_class, model, training.log)
            found = replace(found, auto=share)
        if found.looked_back or context["ti"].try_number <= 1 or not training.raises_redundancy:
            return found
        last = look_back(training_root(training.checkpoint_dir, context), training.log)
        found = replace(found, last_try=last, looked_back=True)
        if last is not None:
            shards = training.shape(training.build_request().gpus).shards
            training.log.info("%s", last.sentence(shards))
        return found


def auto_redundancy(conn_id: str, task_class: str, model: str | None, log: Logger) -> float:
    """Return the share of redundant shards that earlier failures call for, and log why."""
    hook = GpuBrokerHook(conn_id, patience_s=_PATIENCE_S, timeout_s=_PATIENCE_S)
    try:
        found = hook.redundancy(task_class, model, host=local_host())
    except GpuProviderError as error:
        log.warning(
            "%.0f %% redundant shards, as usual: the broker does not tell how often they fail (%s)",
            100 * USUAL_REDUNDANCY,
            error.message,
        )
        return USUAL_REDUNDANCY
    finally:
        hook.close()
    log.info("%s", found.reason)
    return found.share


def look_back(root: Path, log: Logger) -> LastTry | None:
    """Return what became of the training's newest try, None when nothing readable is left of it."""
    try:
        return last_try(RunFolder(root))
    except (OSError, ValueError) as error:
        log.warning("The redundancy stays as it is: what the try before left cannot be read (%s)", error)
        return None
