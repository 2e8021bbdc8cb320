"""What a training run that has ended means for its task: an XCom, a retry, or the end.

Read from the run's record only, so that it makes no difference who followed the run. Used by
`operators.training`.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk.exceptions import AirflowFailException

from airflow_gpu_provider.exceptions import WorkerGroupFailed
from airflow_gpu_provider.training.run_file import RunRecord


def training_result(record: RunRecord) -> dict[str, Any]:
    """Return the XCom of a run that succeeded; raise what tells Airflow whether to retry otherwise."""
    if record.is_success and record.script is not None:
        return {
            "checkpoint_dir": record.script.checkpoint_dir,
            "restarts": record.script.restarts,
            "failures": [failure.sentence for failure in record.failures],
        }
    if not record.is_success or record.checkpoint is None:
        failures = {f.rank: f.sentence for f in record.failures if f.rank is not None}
        error = WorkerGroupFailed(
            f"The training ended {record.state.value}: {record.error}",
            reason=record.unreplaced[-1].cause.value if record.unreplaced else record.state.value,
            failures=failures,
        )
        if record.hopeless:
            raise AirflowFailException(f"{error.message} [{error.reason}]") from error
        raise error
    return {
        "checkpoint": record.checkpoint.path,
        "sha256": record.checkpoint.sha256,
        "state_sha256": record.checkpoint.state_sha256,
        "steps": record.step_count,
        "resumed_from": record.resumed_from,
        "takeovers": record.takeovers,
        "summary": record.summary.model_dump(),
        "result": record.result,
    }
