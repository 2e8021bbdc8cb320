"""How much redundancy a try gets: by the broker's history, and by what became of the try before.

``redundancy="auto"`` asks the broker, whose history knows how often shards fail. A training must start
without it too: a broker that does not answer, or does not know the question, leaves the usual share, and a
folder that cannot be read raises nothing. Used by `operators.training`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from airflow_gpu_provider.exceptions import GpuProviderError
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.inventory.host import local_host
from airflow_gpu_provider.training.next_try import LastTry, last_try
from airflow_gpu_provider.training.run_folder import RunFolder
from airflow_gpu_provider.training.slots import USUAL_REDUNDANCY

if TYPE_CHECKING:
    from airflow.sdk.types import Logger

#: The answer is worth little: whoever waits for devices need not wait for it.
_PATIENCE_S = 2.0


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
