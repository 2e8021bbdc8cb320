from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone

import pytest

from airflow_gpu_provider.broker.drain import Drain, DrainScope
from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.exceptions import LeaseLost
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server import views
from airflow_gpu_provider.server.auth import lease_secret
from airflow_gpu_provider.server.board import TaskId
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.reconciler import TaskState, why_over
from airflow_gpu_provider.store.drains import DrainStore
from airflow_gpu_provider.wire import TASK_OVER, ClaimBody, ClaimState, RenewBody, RequestBody, TaskKey

from .conftest import report

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


def test_leases_and_claims_of_ended_tasks_end_and_others_stay(settings: Settings) -> None:
    asked: list[set[TaskId]] = []
    killed = ("d", "r", "killed", -1)
    states = {("d", "r", "waits killed", -1): TaskState("failed", 1)}

    def task_states(tasks: Iterable[TaskId]) -> dict[TaskId, TaskState]:
        asked.append(set(tasks))
        return {task: TaskState("running", 1) for task in asked[-1]} | states

    broker = Broker(settings, task_states=task_states)
    broker.start()
    broker.report(ReportBody(nodes=(report(gpus=3),)))

    def submit(task: str, ti_id: str | None, gpus: int = 1) -> str:
        key = TaskKey(dag_id="d", run_id="r", task_id=task, map_index=-1, try_number=1)
        body = ClaimBody(key=key, request=RequestBody(gpus=gpus), ti_id=ti_id)
        return asyncio.run(broker.submit(body, is_attended=False)).claim_id

    def state(claim_id: str) -> ClaimState:
        return asyncio.run(broker.find(claim_id)).state

    def until(claim_id: str, wanted: ClaimState) -> None:
        deadline = time.monotonic() + 20
        while state(claim_id) is not wanted:
            assert time.monotonic() < deadline, f"{state(claim_id)}, not {wanted}"
            time.sleep(0.05)

    try:
        ids = {name: submit(name, "ti") for name in ("killed", "alive")} | {"none": submit("no task", None)}
        for claim_id in ids.values():
            until(claim_id, ClaimState.GRANTED)
        until(submit("waits killed", "ti", gpus=3), ClaimState.CANCELLED)
        states[killed] = TaskState("failed", 1)
        until(ids["killed"], ClaimState.ENDED)
        assert (asyncio.run(broker.find(ids["killed"]))).reason_code == "task_failed"
        assert {state(ids["alive"]), state(ids["none"])} == {ClaimState.GRANTED}
        assert not any(task[2] == "no task" for tasks in asked for task in tasks)
    finally:
        broker.stop()


def test_an_airflow_database_that_hangs_stops_nothing_else_and_is_told(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    asked, answers = [], threading.Event()

    def hangs(tasks: Iterable[TaskId]) -> dict[TaskId, TaskState]:
        asked.append(time.monotonic())
        answers.wait()
        return {task: TaskState("running", 1) for task in tasks}

    ahead = timedelta()
    broker = Broker(settings, task_states=hangs, clock=lambda: datetime.now(timezone.utc) + ahead)
    broker.start()
    broker.report(ReportBody(nodes=(report(gpus=1),)))
    body = ClaimBody(key=KEY.model_copy(update={"try_number": 1}), request=RequestBody(gpus=1), ti_id="ti")
    try:
        asyncio.run(broker.submit(body, is_attended=True))
        until(lambda: asked, "the question")
        # What another replica was told reaches this one by its upkeep.
        wish = Drain(DrainScope.NODE, "n1", "rewiring", by="ada", since=broker.clock())
        DrainStore(broker.engine).put(wish)
        until(lambda: broker.drains.in_force(), "the drain of another replica")
        ahead = timedelta(seconds=10)
        until(lambda: "does not answer" in caplog.text, "a word in the log")
        assert "not known since" in (views.status(broker).trouble or "")
        assert "not known since" in str(views.status(broker))
        assert len(asked) == 1, "never two questions at once"
        answers.set()
        until(lambda: views.status(broker).trouble is None, "the end of it")
        answers.clear()
        seen = len(asked)
        until(lambda: len(asked) > seen, "a question that hangs while the broker stops")
    finally:
        broker.stop()
        answers.set()
    assert not broker.upkeep.is_alive() and not broker.leader.is_alive()


def test_an_airflow_database_that_fails_is_told_with_its_words(settings: Settings) -> None:
    def fails(tasks: Iterable[TaskId]) -> dict[TaskId, TaskState]:
        raise ConnectionError("no route to the metadata database")

    broker = Broker(settings, task_states=fails)
    broker.start()
    broker.report(ReportBody(nodes=(report(gpus=1),)))
    body = ClaimBody(key=KEY.model_copy(update={"try_number": 1}), request=RequestBody(gpus=1), ti_id="ti")
    try:
        asyncio.run(broker.submit(body, is_attended=True))
        until(lambda: "no route to" in (views.status(broker).trouble or ""), "the words")
    finally:
        broker.stop()


@pytest.mark.parametrize("state", ["running", "deferred", "queued", "up_for_retry", None])
@pytest.mark.parametrize("try_number", [2, 3])
def test_work_that_outlives_its_worker_lives_between_tries_and_in_a_later_one(
    state: str | None, try_number: int
) -> None:
    assert why_over(KEY, TaskState(state, try_number), outlives_worker=True) is None


@pytest.mark.parametrize(
    "state, reason",
    [
        (TaskState("failed", 2), "task_failed"),
        (TaskState("success", 3), "task_success"),
        (TaskState("skipped", 2), "task_skipped"),
        (TaskState("restarting", 2), "task_restarting"),
        (None, "task_removed"),
    ],
)
def test_work_that_outlives_its_worker_ends_with_its_task(state: TaskState | None, reason: str) -> None:
    assert why_over(KEY, state, outlives_worker=True) == reason


def test_work_without_a_worker_is_told_to_save_before_its_lease_is_ended(settings: Settings) -> None:
    states = {}

    def task_states(tasks: Iterable[TaskId]) -> dict[TaskId, TaskState]:
        return {task: TaskState(states.get(task, "up_for_retry"), 1) for task in tasks}

    broker = Broker(settings, task_states=task_states)
    broker.start()
    broker.report(ReportBody(nodes=(report(gpus=1),)))
    key = TaskKey(dag_id="d", run_id="r", task_id="trains", map_index=-1, try_number=1)
    body = ClaimBody(key=key, request=RequestBody(gpus=1), ti_id="ti", outlives_worker=True)
    try:
        claim_id = asyncio.run(broker.submit(body, is_attended=True)).claim_id
        until(lambda: asyncio.run(broker.collect(claim_id)).held is not None, "granted")
        lease = asyncio.run(broker.collect(claim_id)).held
        assert lease is not None
        secret = lease_secret(broker.signing_key, lease.lease_id, lease.epoch)
        renewal = RenewBody(secret=secret, epoch=lease.epoch)
        broker.upkeep.reconciler.reconcile()
        asyncio.run(broker.renew(lease.lease_id, renewal))
        states[("d", "r", "trains", -1)] = "failed"
        broker.upkeep.reconciler.reconcile()
        with pytest.raises(LeaseLost, match="save and stop") as refused:
            asyncio.run(broker.renew(lease.lease_id, renewal))
        assert refused.value.reason == TASK_OVER
        assert len(broker.repository.live_leases()) == 1, "the devices are not another's yet"
        states[("d", "r", "trains", -1)] = "queued"
        broker.upkeep.reconciler.reconcile()
        asyncio.run(broker.renew(lease.lease_id, renewal))
        states[("d", "r", "trains", -1)] = "failed"
        (entry,) = broker.desk.board.entries.values()
        broker.upkeep.reconciler.reconcile()
        assert entry.over_since is not None
        entry.over_since -= timedelta(seconds=2 * settings.lease_ttl_s)
        until(lambda: not broker.repository.live_leases(), "ended though it did not stop")
    finally:
        broker.stop()


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
