"""``on_retry_callback=spawn_redundant_shards``: the next try of a training starts with more redundant shards.

The callback is a switch and a voice. That the task names it is what counts: the next try reads what the lost
one left and raises its own redundancy, so that it also does when the worker was killed, where Airflow runs
callbacks late, elsewhere or never. When it does run, it tells beforehand what the next try will do. The rule
is in `training.next_try`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow.sdk import Context

log = logging.getLogger(__name__)


def spawn_redundant_shards(context: Context) -> None:
    """Let the next try of a `DistributedTrainingOperator` have more redundant shards than the lost one."""
    ti = context["ti"]
    task = context.get("task") or getattr(ti, "task", None)
    tell = getattr(task, "redundancy_after", None)
    if tell is None or _is_unrendered(task):
        # The DAG processor calls this after a killed worker, for the task as it stands in the DAG's file.
        log.info("The next try of %s sets its redundant shards by what this one left", ti.task_id)
    else:
        log.info("Next try of %s: %s", ti.task_id, tell(context) or "redundant shards as before")


def _is_unrendered(task: object) -> bool:
    names = getattr(task, "template_fields", ())
    return any("{{" in str(getattr(task, name, "")) for name in names)
