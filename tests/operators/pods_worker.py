"""A task process as an Airflow worker runs it: one try of a gang of pods, ``python -m ... TRY COMMAND``.

Begins when it is sent a line, since loading takes as long as a lease lives on a busy machine. Prints its
result or how it failed, as one line of JSON, and takes SIGTERM as Airflow's task runner does.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from typing import Any

from airflow_gpu_provider.exceptions import GpuProviderError
from airflow_gpu_provider.operators.gpu_pods import GpuPodsOperator
from tests.operators.training_worker import context


def main(try_number: int, command: list[str]) -> None:
    """Run one try."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    task = GpuPodsOperator(
        task_id="train", image="x:1", command=command, gpus=4, kubernetes_conn_id="prod", deferrable=False
    )
    import airflow.providers.cncf.kubernetes.hooks.kubernetes  # noqa: F401 - loaded before it begins

    print("READY", file=sys.stderr, flush=True)
    sys.stdin.readline()
    signal.signal(signal.SIGTERM, lambda *_: task.on_kill())
    said: dict[str, Any]
    try:
        said = {"result": type(task).execute.__wrapped__(task, context("run", try_number))}  # type: ignore[attr-defined]
    except (GpuProviderError, SystemExit) as error:
        said = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
