"""What a process sees of the devices it works on, and of its part of a shared one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_provider.operators.device_environment import environment_of, memory_limit_mib
from airflow_gpu_provider.wire import DeviceView


def device(name: str = "GPU-a", **more: Any) -> DeviceView:
    fields = {"node": "n", "host": "h", "model": "A100", "memory_mib": 81_920, "tflops": 35.0}
    return DeviceView(id=name, **{**fields, "simulated": False, **more})


@pytest.fixture
def mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which the daemon keeps its pipes; there is none yet."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    return tmp_path


def test_a_whole_device_has_no_limit_whatever_serves_the_machine(mps: Path) -> None:
    (mps / "control").touch()
    assert environment_of("l1", [device(), device("GPU-b")]) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
        "NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b",
        "GPU_LEASE_ID": "l1",
    }


def test_a_share_is_the_same_device_with_its_memory(mps: Path) -> None:
    environment = environment_of("l1", [device(milli=125)])
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert environment["GPU_MEMORY_LIMIT_MIB"] == "10240"
    assert not any("MPS" in name for name in environment), "no daemon runs here"


def test_where_mps_runs_it_is_told_the_part(mps: Path) -> None:
    (mps / "control").touch()
    environment = environment_of("l1", [device(milli=255)])
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=20889M"
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"


def test_a_simulated_share_hides_real_devices_and_still_tells_its_memory(mps: Path) -> None:
    (mps / "control").touch()
    environment = environment_of("l1", [device(simulated=True, milli=500)])
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["NVIDIA_VISIBLE_DEVICES"]) == ("", "void")
    assert environment["GPU_MEMORY_LIMIT_MIB"] == "40960"
    assert not any("MPS" in name for name in environment)


def test_the_limits_of_all_who_share_a_device_are_together_no_more_than_it_has() -> None:
    parts = [333, 333, 334]
    limits = [memory_limit_mib([device(memory_mib=81_559, milli=milli)]) or 0 for milli in parts]
    assert sum(limits) <= 81_559 < sum(limits) + len(parts)
    assert memory_limit_mib([device()]) is None
