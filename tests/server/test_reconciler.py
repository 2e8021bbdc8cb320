from __future__ import annotations

from collections.abc import Iterable

import pytest

from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.reconciler import TaskId, TaskState, reconcile, why_over
from airflow_gpu_provider.wire import ClaimBody, RequestBody, TaskKey

KEY = TaskKey(dag_id="d", run_id="r", task_id="t", map_index=3, try_number=2)


@pytest.mark.parametrize("state", ["running", "deferred", "scheduled", "queued"])
def test_a_try_lives_while_its_task_runs_or_is_on_its_way(state: str) -> None:
    assert why_over(KEY, TaskState(state, 2)) is None


@pytest.mark.parametrize(
    "state, reason",
    [
        (TaskState("failed", 2), "task_failed"),
        (TaskState("success", 2), "task_success"),
        (TaskState("up_for_retry", 2), "task_up_for_retry"),
        (TaskState(None, 2), "task_cleared"),
        (TaskState("running", 3), "later_try"),
        (None, "task_removed"),
    ],
)
def test_a_try_is_over_with_its_task(state: TaskState | None, reason: str) -> None:
    assert why_over(KEY, state) == reason


def test_leases_and_claims_of_ended_tasks_end_and_others_stay(broker: Broker) -> None:
    def submit(task: str, ti_id: str | None) -> str:
        key = TaskKey(dag_id="d", run_id="r", task_id=task, map_index=-1, try_number=1)
        return broker.submit(ClaimBody(key=key, request=RequestBody(gpus=1), ti_id=ti_id))

    ids = {name: submit(name, "ti") for name in ("killed", "alive")}
    ids["no task"] = submit("no task", None)
    asked: list[set[TaskId]] = []

    def states(tasks: Iterable[TaskId]) -> dict[TaskId, TaskState]:
        asked.append(set(tasks))
        return {
            ("d", "r", "killed", -1): TaskState("failed", 1),
            ("d", "r", "alive", -1): TaskState("running", 1),
        }

    assert reconcile(broker.repository, states, broker.clock()) == 1
    assert asked == [{("d", "r", "killed", -1), ("d", "r", "alive", -1)}]
    found = {view.claim_id: view.state.value for view in broker.views(list(ids.values()))}
    assert found[ids["killed"]] in ("ended", "cancelled")
    assert {found[ids["alive"]], found[ids["no task"]]} <= {"pending", "granted"}
    assert reconcile(broker.repository, states, broker.clock()) == 0
