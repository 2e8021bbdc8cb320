"""Real shard processes are killed and stopped; the weights must not show it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_provider.training.failures import FailureCause
from airflow_gpu_provider.training.measurements import read_telemetry
from airflow_gpu_provider.training.next_try import last_try
from airflow_gpu_provider.training.run_file import RunRecord, RunState, read_record
from airflow_gpu_provider.training.run_folder import RunFolder
from tests.training.oracle import expected_weights
from tests.training.running import Running, is_alive, make_plan, start


def weights(record: RunRecord) -> str:
    assert record.state is RunState.SUCCEEDED, record
    assert record.checkpoint is not None
    return record.checkpoint.state_sha256


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Running:
    """Return a run without failed shards, whose network broke once."""
    # Losses are reported twice a second: the last 20 steps have to take longer than that.
    params = {"cut_network_at": 25, "pause_s": 0.03}
    running = start(make_plan(tmp_path_factory.mktemp("finished"), params=params))
    running.end()
    return running


def test_a_broken_network_is_retried_by_the_same_shards(finished: Running) -> None:
    record = finished.end()
    assert record.sync_retries == 1 and record.failures == [] and record.generation == 1
    assert weights(record) == expected_weights(10)


def test_a_run_learns_and_tells_how(finished: Running) -> None:
    record = finished.end()
    assert (record.step, record.step_count) == (60, 60)
    assert record.result["shard"] == 0  # type: ignore[index, call-overload]
    lines = list(read_telemetry(finished.plan.paths.telemetry))
    losses = {(line["shard"], line["step"]): line["loss"] for line in lines if line["kind"] == "report"}
    first = [losses[shard, 0] for shard in (0, 1)]
    last = [loss for (_, step), loss in losses.items() if step > 40]
    assert sum(last) / len(last) < 0.7 * sum(first) / 2, "it really learns"
    syncs = [line for line in lines if line["kind"] == "sync"]
    assert {line["step"] for line in syncs} <= {10, 20, 30, 40, 50, 60}
    assert {line["shard"] for line in syncs if line["step"] == 60} == {0, 1}
    assert all(line["bytes"] > 0 and 0 < line["sync_s"] <= line["window_s"] for line in syncs)


def test_shards_killed_and_stopped_are_replaced_and_the_weights_are_bitwise_the_same(
    training: Callable[..., Running],
) -> None:
    running = training(spares=3, params={"pause_s": 0.05})
    running.until_step(10)
    survivor = running.pid_of_rank(0)
    running.hurt(1, signal.SIGKILL)
    running.until(lambda record: len(record.takeovers) == 1 and record.step >= 20, "the first takeover")
    assert running.pid_of_rank(0) == survivor, "a survivor is never restarted"

    running.hurt(0, signal.SIGKILL)
    running.until(lambda record: len(record.takeovers) == 2 and record.step >= 30, "the second takeover")
    running.hurt(1, signal.SIGSTOP)
    record = running.end()

    causes = [(failure.rank, failure.cause) for failure in record.failures]
    assert causes == [(1, FailureCause.KILLED), (0, FailureCause.KILLED), (1, FailureCause.HUNG)]
    assert "SIGKILL" in record.failures[0].evidence and "stopped by a signal" in record.failures[2].evidence
    assert record.generation == 3
    assert weights(record) == expected_weights(10)


def test_a_lost_spare_is_replaced_and_when_all_shards_are_lost_at_once_spares_load_the_checkpoint(
    training: Callable[..., Running],
) -> None:
    running = training(spares=2, max_respawns=3, params={"pause_s": 0.1})
    running.until(
        lambda record: record.checkpoint is not None and record.checkpoint.step >= 10, "a checkpoint"
    )
    running.until(lambda record: record.warm == ["u2", "u3"], "both spares")
    os.kill(running.pids()["u2"], signal.SIGKILL)
    record = running.until(lambda record: record.warm == ["u3", "u4"], "another spare")
    assert record.generation == 0 and record.takeovers == [], "nobody else has noticed"
    supervisor = running.supervisor()
    shards = [running.pid_of_rank(rank) for rank in (0, 1)]
    os.kill(supervisor, signal.SIGSTOP)  # so that it meets both losses in one look
    for pid in shards:
        os.kill(pid, signal.SIGKILL)
    while any(is_alive(pid) for pid in shards):
        time.sleep(0.01)
    os.kill(supervisor, signal.SIGCONT)
    record = running.end()
    assert len(record.takeovers) == 2
    lines = read_telemetry(running.plan.paths.telemetry)
    last = record.generation
    joined = [line["step"] for line in lines if line["kind"] == "joined" and line["generation"] == last]
    assert len(joined) == 2 and min(joined) >= 10, "not from the beginning"  # type: ignore[type-var, operator]
    assert weights(record) == expected_weights(10)


def test_gradients_reduced_at_every_step_survive_a_kill_bitwise(training: Callable[..., Running]) -> None:
    running = training(spares=1, sync_interval=1, params={"pause_s": 0.05})
    running.until_step(15)
    running.hurt(0, signal.SIGKILL)
    record = running.end()
    assert [failure.cause for failure in record.failures] == [FailureCause.KILLED]
    assert weights(record) == expected_weights(1)


def test_sharing_gradients_and_sharing_weights_are_different_trainings() -> None:
    assert expected_weights(1) != expected_weights(10)


@pytest.mark.parametrize(("half", "sync_interval"), [("float16", 4), ("bfloat16", 1)])
def test_mixed_precision_and_a_compiled_model_survive_a_kill_bitwise(
    tmp_path_factory: pytest.TempPathFactory, half: str, sync_interval: int
) -> None:
    changes: dict[str, Any] = {"entrypoint": "tests.training.precise:train", "sync_interval": sync_interval}
    calm = start(make_plan(tmp_path_factory.mktemp("calm"), params={"half": half}, **changes))
    folder = tmp_path_factory.mktemp("hurt")
    hurt = start(make_plan(folder, spares=1, params={"half": half, "pause_s": 0.2}, **changes))
    try:
        hurt.until_step(8)
        hurt.hurt(1, signal.SIGKILL)
        record, expected = hurt.end(), calm.end()
    finally:
        hurt.run.kill()
        calm.run.kill()
    assert record.takeovers == ["u2 took rank 1 of u1"]
    assert weights(record) == weights(expected)
    if half == "float16":
        assert expected.result["skipped"] > 0, "the scaler was needed"  # type: ignore[index, call-overload, operator]


def test_without_spares_the_run_fails_and_the_retry_resumes_to_the_same_weights(
    training: Callable[..., Running],
) -> None:
    first = training(params={"pause_s": 0.05})
    first.until(lambda record: record.checkpoint is not None and record.checkpoint.step >= 20, "a checkpoint")
    first.hurt(0, signal.SIGKILL)
    failed = first.end()
    assert failed.state is RunState.FAILED and not failed.hopeless
    assert "1 more shard(s) were lost than there were spares" in str(failed.error)
    assert "SIGKILL" in str(failed.error) and "retry resumes" in str(failed.error)
    assert first.pids() == {}

    # The retry loses a shard too: this time one respawn is allowed.
    second = training(attempt="try-2", max_respawns=1, params={"pause_s": 0.05})
    second.until(lambda record: record.step >= 40, "progress")
    second.hurt(1, signal.SIGKILL)
    record = second.end()
    assert record.resumed_from is not None and record.resumed_from >= 20
    assert record.takeovers == ["u2 took rank 1 of u1"] and record.spares == []
    assert weights(record) == expected_weights(10)


def test_more_shards_are_lost_than_there_are_respawns_as_long_as_training_gets_on(
    training: Callable[..., Running],
) -> None:
    running = training(spares=1, max_respawns=1, params={"pause_s": 0.05})
    for number, step in enumerate((10, 20, 30)):
        running.until(lambda record, step=step: record.step >= step and record.warm != [], "a warm spare")
        running.hurt(number % 2, signal.SIGKILL)
        running.until(lambda record, done=number + 1: len(record.takeovers) == done, "the takeover")
    record = running.end()
    assert len(record.failures) == 3
    assert weights(record) == expected_weights(10)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_without_the_process_that_forks_shards_they_are_started_cold(
    training: Callable[..., Running], number: int
) -> None:
    running = training(max_respawns=1, params={"pause_s": 0.05})
    running.until_step(10)
    os.kill(running.nursery(), number)
    running.hurt(1, signal.SIGKILL)
    record = running.end()
    assert record.takeovers == ["u2 took rank 1 of u1"]
    assert "they start slowly from here on" in running.logs()
    assert weights(record) == expected_weights(10)


def test_a_lost_supervisor_is_replaced_and_the_run_goes_on_from_the_checkpoint(
    training: Callable[..., Running],
) -> None:
    running = training(spares=1, params={"pause_s": 0.05})
    running.until(
        lambda record: record.checkpoint is not None and record.checkpoint.step >= 20, "a checkpoint"
    )
    first, shards = running.supervisor(), running.pids()
    os.kill(first, signal.SIGKILL)
    running.until(lambda record: record.pid != first and record.step >= 30, "progress under another one")
    assert not set(running.pids().values()) & set(shards.values()), "its shards ended with it"
    running.hurt(1, signal.SIGKILL)
    record = running.end()
    assert record.supervisor_restarts == 1 and record.resumed_from is not None
    assert record.resumed_from >= 20 and record.takeovers == ["u5 took rank 1 of u4"]
    assert weights(record) == expected_weights(10)


def test_a_shard_lost_after_the_last_step_is_replaced_from_the_final_checkpoint(
    training: Callable[..., Running],
) -> None:
    running = training(spares=1, params={"pause_after_s": 1.5})
    running.until(lambda record: record.state is RunState.FINISHING, "the end of the loop")
    running.hurt(0, signal.SIGKILL)
    record = running.end()
    assert record.takeovers == ["u2 took rank 0 of u0"]
    assert weights(record) == expected_weights(10)


@pytest.mark.parametrize(
    ("mistake", "cause", "words"),
    [
        ({"raise_at": 13}, FailureCause.USER_ERROR, ["KeyError", "no such column: price", "shard 1"]),
        ({"nan_at": 17}, FailureCause.NON_FINITE, ["loss of shard 1 is nan", "step 17", "learning rate"]),
    ],
)
def test_what_a_spare_could_not_do_better_ends_the_run_at_once(
    training: Callable[..., Running], mistake: dict[str, int], cause: FailureCause, words: list[str]
) -> None:
    running = training(spares=1, params=mistake)
    record = running.end()
    assert record.state is RunState.FAILED and record.hopeless
    assert [(failure.cause, failure.rank, failure.step) for failure in record.failures] == [
        (cause, 1, next(iter(mistake.values())))
    ]
    assert record.takeovers == [] and record.spares == ["u2"], "no spare is burnt"
    for word in words:
        assert word in str(record.error)
    assert running.pids() == {}


def test_the_store_is_reachable_on_loopback_only_and_needs_the_secret(
    training: Callable[..., Running],
) -> None:
    running = training(params={"pause_s": 0.05})
    running.until_step(10)
    supervisor = Path(f"/proc/{running.supervisor()}")
    sockets = {os.readlink(entry) for entry in (supervisor / "fd").iterdir() if entry.exists()}
    connections = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [line[1] for line in connections if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]
    assert len(listening) == 1 and listening[0].startswith("0100007F:"), "127.0.0.1"
    for pid in (running.run.pid, running.supervisor(), *running.pids().values()):
        assert not re.search(r"[0-9a-f]{32}", Path(f"/proc/{pid}/cmdline").read_text()), "all can read it"
    os.kill(running.run.pid, signal.SIGTERM)
    record = running.end()
    assert record.state is RunState.STOPPED and "SIGTERM" in str(record.error)
    assert record.checkpoint is not None and record.checkpoint.step >= 10


def test_a_loss_that_is_not_finite_is_only_recorded_where_that_is_allowed(
    training: Callable[..., Running],
) -> None:
    running = training(params={"report_nan_at": 17}, allow_non_finite_loss=True)
    record = running.end()
    assert record.state is RunState.SUCCEEDED and record.failures == []
    assert weights(record) == expected_weights(10), "the training itself was not touched"


def test_a_run_whose_worker_was_killed_says_so_for_the_next_try(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, params={"steps": 100_000}, attempt="attempts/try-1")
    plan.paths.create()
    plan.paths.plan.write_text(plan.model_dump_json())
    code = (
        "import sys, time; from pathlib import Path\n"
        "from airflow_gpu_provider.launchers.local import LocalLauncher\n"
        "from airflow_gpu_provider.training.plan import RunPlan\n"
        "LocalLauncher().start(RunPlan.model_validate_json(Path(sys.argv[1]).read_text())); time.sleep(600)"
    )
    worker = subprocess.Popen([sys.executable, "-c", code, str(plan.paths.plan)])
    try:
        wait_for(plan.paths.run, RunState.RUNNING)
    finally:
        worker.kill()
        worker.wait()
    wait_for(plan.paths.run, RunState.STOPPED)
    last = last_try(RunFolder(tmp_path))
    assert last is not None and (last.spares, last.more) == (0, 1)
    assert "broke off with its worker" in last.sentence(2)


def wait_for(run_file: Path, state: RunState) -> None:
    deadline = time.monotonic() + 60
    while (record := read_record(run_file)) is None or record.state is not state:
        assert time.monotonic() < deadline, record
        time.sleep(0.05)
