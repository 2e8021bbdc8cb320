"""Trainings of real tasks in a real Airflow that is killed below them, marked, cleared and asked wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_provider.training.run_file import RunState
from scripts.rest import BrokerApi
from scripts.stack import Stack
from tests.stack.training_runs import TrainingTask, assert_all_end, kill_program, until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


@pytest.fixture
def start(stack: Stack, broker: Callable[[str], BrokerApi]) -> Callable[..., TrainingTask]:
    """Return ``start(dag_id, **conf)``: trigger a run with one training."""

    def trigger(dag_id: str, **conf: Any) -> TrainingTask:
        return TrainingTask(stack, broker("admin"), dag_id, **conf)

    return trigger


@pytest.fixture
def held(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Return the configuration of a training that waits in the middle, until the file in it is there."""
    file = tmp_path / "go-on"
    yield {"steps": 100, "hold_at": 50, "hold_file": str(file)}
    file.touch()  # no training of a test that failed waits for ever


def go_on(held: dict[str, Any]) -> None:
    """Let a held training go on."""
    Path(held["hold_file"]).touch()


def test_the_language_model_ends_alike_though_a_shard_its_worker_and_the_api_server_are_killed(
    stack: Stack, start: Callable[..., TrainingTask]
) -> None:
    alone = start("fine_tune_language_model", task_id="fine_tune", sync_interval=50).succeeds()
    training = start("language_model_followed", task_id="fine_tune", sync_interval=50)
    training.trains()
    (lease,) = training.leases()
    task, processes = training.task_process(), training.processes()
    training.shard(rank=0).kill()
    until(lambda: training.record().takeovers, "a spare takes over")
    task.parent().kill()
    kill_program(stack, "api-server")
    assert_all_end([task])
    until(lambda: not stack.api.unhealthy(), "the API server is back")
    leases = training.leases()
    assert [each["lease_id"] for each in leases] in ([lease["lease_id"]], []), "one lease, the same"
    result = training.succeeds()
    assert (result["result"], result["state_sha256"]) == (alone["result"], alone["state_sha256"])
    assert training.attempts == ["try-1"] and result["resumed_from"] is None, "its shards were not restarted"
    assert len(result["takeovers"]) == 1
    assert training.leases() == []
    assert_all_end(processes)


@pytest.mark.slow
def test_a_deferred_training_hands_its_result_over_though_the_triggerer_was_killed(
    stack: Stack, start: Callable[..., TrainingTask], held: dict[str, Any]
) -> None:
    training = start("training_deferred", **held)
    training.trains(40)
    until(lambda: training.state == "deferred", "it leaves its worker")
    kill_program(stack, "triggerer")
    processes = training.processes()
    go_on(held)
    result = training.succeeds()
    assert (result["steps"], result["resumed_from"]) == (100, None)
    assert training.instance()["try_number"] == 1
    assert_all_end(processes)


def test_a_retry_goes_on_with_the_training_of_a_worker_that_was_stopped(
    start: Callable[..., TrainingTask], held: dict[str, Any]
) -> None:
    training = start("training_followed", **held)
    before = training.trains(40)
    training.task_process().parent().terminate()  # as a service manager does
    until(lambda: training.leases()[0]["key"]["try_number"] == 2, "the retry has the lease")
    go_on(held)
    result = training.succeeds()
    record = training.record()
    assert record is not None and (record.pid, record.failures) == (before.pid, [])
    assert (result["steps"], training.attempts) == (100, ["try-1"])


@pytest.mark.parametrize(
    "dag_id", [pytest.param("training_followed", marks=pytest.mark.slow), "training_deferred"]
)
def test_marking_a_training_failed_saves_it_and_gives_its_devices_back(
    dag_id: str, start: Callable[..., TrainingTask], held: dict[str, Any]
) -> None:
    training = start(dag_id, **{**held, "steps": 100_000, "hold_at": -1})
    training.trains(40)
    if dag_id == "training_deferred":
        until(lambda: training.state == "deferred", "it leaves its worker")
    processes = training.processes()
    training.mark_failed()
    until(lambda: training.leases() == [], "the devices return", 30)
    assert_all_end(processes)
    record = training.record()
    assert record is not None and record.state is RunState.STOPPED, record
    assert record.checkpoint is not None and record.checkpoint.step > 0


@pytest.mark.slow
def test_a_cleared_training_trains_anew(start: Callable[..., TrainingTask]) -> None:
    training = start("training_followed")
    first = training.succeeds()
    training.clear()
    until(lambda: training.instance()["try_number"] == 2, "it starts again")
    second = training.succeeds()
    assert len(training.attempts) == 2 and second["resumed_from"] is None
    assert second["state_sha256"] == first["state_sha256"]


@pytest.mark.slow
def test_mapped_trainings_keep_apart(
    stack: Stack, broker: Callable[[str], BrokerApi], start: Callable[..., TrainingTask]
) -> None:
    one = start("trainings_mapped", map_index=0)
    two = TrainingTask(stack, broker("admin"), "trainings_mapped", run_id=one.run_id, map_index=1)
    digests = [each.succeeds()["state_sha256"] for each in (one, two)]
    assert digests[0] != digests[1], "each has a seed of its own"
    assert [each.attempts for each in (one, two)] == [["try-1"], ["try-1"]]


def test_a_wrong_request_in_the_configuration_fails_at_once_and_takes_no_lease(
    start: Callable[..., TrainingTask],
) -> None:
    gpu = {"count": 2, "model": "A100"}
    wrong: dict[str, dict[str, Any]] = {
        "3 shards": {"shard_count": 3},
        "64GiB": {"resource_requirements": {"gpu": gpu, "memory": "64"}},
        "modle": {"resource_requirements": {"gpu": {"count": 2, "modle": "A100"}}},
    }
    every = {
        told: start("fine_tune_language_model", task_id="prepare_artifacts", **conf)
        for told, conf in wrong.items()
    }
    for told, first in every.items():
        until(lambda first=first: first.state == "failed", f"the one that is told {told} fails")
        assert first.instance()["try_number"] == 1
        assert told in first.log()
        assert first.leases() == []
