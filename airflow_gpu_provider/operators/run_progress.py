"""How much of its DAG run a task completes: told with its claim, so that nearly done runs are finished first.

Counted once, when the task asks, by two counts of Airflow's execution API. Whatever keeps it from being
known, the task asks without it: it is then lifted by nothing. The next step is `asking.claim_body`.
"""

from __future__ import annotations

import logging
from typing import Any

from airflow.sdk.exceptions import AirflowRuntimeError

log = logging.getLogger(__name__)

#: Task instances that wait for nobody any more, however they ended.
_OVER = ["success", "failed", "skipped", "upstream_failed", "removed"]


def completes(ti: Any) -> float | None:
    """Return the part 0..1 of its run's task instances that are over once this one is; None = unknown."""
    count = getattr(ti, "get_ti_count", None)
    if count is None:  # outside of Airflow's task runner
        return None
    try:
        every = count(dag_id=ti.dag_id, run_ids=[ti.run_id])
        over = count(dag_id=ti.dag_id, run_ids=[ti.run_id], states=_OVER)
    except AirflowRuntimeError as error:
        log.info("How far run %s is is not known, the claim goes without it: %s", ti.run_id, error)
        return None
    return min(1.0, (over + 1) / every) if every > 0 else None
