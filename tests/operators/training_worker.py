"""A task process as an Airflow worker runs it: one try of a training, ``python -m ... FOLDER TRY PARAMS``.

Prints its result or how it failed, as one line of JSON, and takes SIGTERM as Airflow's task runner does.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from airflow.sdk.exceptions import TaskDeferred

from airflow_gpu_provider.exceptions import GpuProviderError
from airflow_gpu_provider.operators.training import DistributedTrainingOperator


def context(run_id: str, try_number: int, max_tries: int) -> Any:
    """Return what the operator reads of a context."""
    ti = SimpleNamespace(
        dag_id="d",
        run_id=run_id,
        task_id="train",
        map_index=-1,
        try_number=try_number,
        max_tries=max_tries,
        id="ti",
    )
    return {"ti": ti, "dag_run": SimpleNamespace(run_type="manual")}


def main(folder: str, try_number: int, arguments: dict[str, Any]) -> None:
    """Run one try."""
    max_tries = arguments.pop("max_tries", 9)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    usual: dict[str, Any] = {
        "entrypoint": "tests.training.entrypoints:train",
        "gpus": 2,
        "redundancy": 0,
        "sync_interval": 10,
        "checkpoint_every": 0.5,
        "deferrable": False,
    }
    training = DistributedTrainingOperator(task_id="train", checkpoint_dir=folder, **{**usual, **arguments})
    signal.signal(signal.SIGTERM, lambda *_: training.on_kill())
    said: dict[str, Any]
    try:
        said = {
            "result": type(training).execute.__wrapped__(
                training, context(Path(folder).parent.name, try_number, max_tries)
            )
        }  # type: ignore[attr-defined]
    except TaskDeferred as deferred:
        said = {"deferred": deferred.method_name}
    except (GpuProviderError, SystemExit) as error:
        said = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
