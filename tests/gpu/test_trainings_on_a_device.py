"""Whole trainings on one GPU: takeover by a spare on the same device, NCCL of one rank, memory, a script."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from airflow_gpu_provider.training.failures import FailureCause
from airflow_gpu_provider.training.measurements import read_telemetry
from airflow_gpu_provider.training.memory_limit import LIMIT_VARIABLE
from airflow_gpu_provider.training.plan import Slot
from airflow_gpu_provider.training.run_file import RunRecord, RunState
from airflow_gpu_provider.training.script import read_script
from tests.training.running import Running, make_plan, start

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parent


def slot(device_id: str, **environment: str) -> Slot:
    """Return a place on the device, as a lease of it gives one."""
    shown = {"CUDA_VISIBLE_DEVICES": device_id, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    return Slot(device_ids=(device_id,), environment={**shown, **environment}, torch_device="cuda:0")


@pytest.fixture
def on_device(tmp_path: Path, device_id: str) -> Any:
    """Return a function that starts shards and spares which all share the device; none outlives its test."""
    started: list[Running] = []

    def start_one(name: str = "run", *, shards: int = 1, spares: int = 0, **changes: Any) -> Running:
        place = slot(device_id)
        fields = {"entrypoint": "tests.gpu.entrypoints:train", "member_slots": (place,) * shards}
        fields |= {"spare_slots": (place,) * spares, **changes}
        started.append(start(make_plan(tmp_path / name, shards=shards, **fields)))
        return started[-1]

    yield start_one
    for running in started:
        running.run.kill()


def state(record: RunRecord) -> dict[str, Any]:
    """Return what the final checkpoint holds, loaded where no device is needed."""
    assert record.state is RunState.SUCCEEDED and record.checkpoint is not None, record
    loaded: dict[str, Any] = torch.load(record.checkpoint.path, map_location="cpu", weights_only=True)
    return loaded


def tensors(value: Any) -> list[torch.Tensor]:
    """Return all tensors in a checkpoint, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def test_a_spare_on_the_device_takes_over_and_the_weights_are_as_without_a_failure(
    on_device: Callable[..., Running], device_id: str
) -> None:
    calm = on_device("calm", shards=2, backend="gloo")
    hurt = on_device("hurt", shards=2, spares=1, backend="gloo")
    hurt.until(lambda record: record.step >= 10 and record.warm != [], "a warm spare")
    hurt.hurt(1, signal.SIGKILL)
    record = hurt.end()
    assert [failure.cause for failure in record.failures] == [FailureCause.KILLED], hurt.logs()
    assert record.takeovers == ["u2 took rank 1 of u1"]
    assert record.result == {"devices": 1, "uuid": device_id, "is_on_device": True}
    expected = tensors(state(calm.end()))
    for mine, other in zip(tensors(state(record)), expected, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("sync_interval", [1, 10])
def test_with_nccl_a_lost_rank_is_started_anew_and_goes_on_from_the_checkpoint(
    on_device: Callable[..., Running], sync_interval: int
) -> None:
    half = {"half": sync_interval == 1}
    running = on_device(backend="nccl", max_respawns=1, sync_interval=sync_interval, params=half)
    running.until(
        lambda record: record.checkpoint is not None and record.checkpoint.step >= 10, "a checkpoint"
    )
    running.hurt(0, signal.SIGKILL)
    record = running.end()
    assert record.takeovers == ["u1 took rank 0 of u0"], running.logs()
    lines = read_telemetry(running.plan.paths.telemetry)
    joined = [line["step"] for line in lines if line["kind"] == "joined" and line["generation"] == 1]
    assert len(joined) == 1 and joined[0] >= 10, "not from the beginning"  # type: ignore[operator]
    assert all(
        bool(torch.isfinite(each).all()) for each in tensors(state(record)) if each.is_floating_point()
    )


def test_a_shard_that_takes_more_than_its_part_of_the_memory_is_the_one_that_fails(
    on_device: Callable[..., Running], device_id: str
) -> None:
    place = slot(device_id, **{LIMIT_VARIABLE: "1536"})
    record = on_device(entrypoint="tests.gpu.entrypoints:take_too_much", member_slots=(place,)).end()
    assert record.state is RunState.FAILED
    assert {failure.cause for failure in record.failures} == {FailureCause.OUT_OF_MEMORY}
    assert "CUDA out of memory" in record.failures[0].evidence


def test_a_script_trains_with_nccl_on_the_device_that_it_sees(
    on_device: Callable[..., Running], device_id: str
) -> None:
    script = read_script("script_on_a_device.py", (), dag_folder=HERE)
    running = on_device(entrypoint=None, script=script)
    record = running.end()
    assert record.state is RunState.SUCCEEDED, running.logs()
    assert f"sum 1.0 on {device_id}, 1 visible" in running.plan.paths.log("u0").read_text()
