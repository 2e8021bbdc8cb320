"""A shard sees its own devices and its part of them, whatever its parents see."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from airflow_gpu_provider.training.run_file import RunState
from airflow_gpu_provider.training.slots import assign_slots
from tests.training.running import Running


@dataclass
class Device:
    id: str
    milli: int = 1000
    simulated: bool = False
    memory_mib: int = 20_000

    @property
    def memory_limit_mib(self) -> int | None:
        return None if self.milli == 1000 else self.memory_mib * self.milli // 1000


def test_each_process_of_a_run_sees_the_devices_of_its_own_shard_only(
    training: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [Device("GPU-a", milli=250), Device("MIG-b")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,MIG-b,GPU-another-task")
    monkeypatch.setenv("GPU_MEMORY_LIMIT_MIB", "123")
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=123M")
    slots = assign_slots(devices, [], shard_count=2, spares=0, backend="gloo").members
    on_cpu = tuple(slot.model_copy(update={"torch_device": "cpu"}) for slot in slots)
    running = training(
        entrypoint="tests.training.entrypoints:tell_devices",
        member_slots=on_cpu,
        params={"folder": str(tmp_path)},
    )
    assert running.end().state is RunState.SUCCEEDED, running.logs()
    seen = [json.loads((tmp_path / f"{shard}.json").read_text()) for shard in (0, 1)]
    assert seen == [
        {
            "CUDA_VISIBLE_DEVICES": "GPU-a",
            "NVIDIA_VISIBLE_DEVICES": "GPU-a",
            "GPU_MEMORY_LIMIT_MIB": "5000",
        },
        {"CUDA_VISIBLE_DEVICES": "MIG-b", "NVIDIA_VISIBLE_DEVICES": "MIG-b"},
    ]
