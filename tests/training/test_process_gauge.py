"""What telemetry tells of a shard's device, from a driver that is not there."""

from __future__ import annotations

from pathlib import Path

import pynvml
import pytest
import torch

from airflow_gpu_provider.inventory.nvml_session import NvmlSession
from airflow_gpu_provider.training import process_gauge
from airflow_gpu_provider.training.measurements import read_telemetry
from airflow_gpu_provider.training.process_gauge import ProcessGauge
from airflow_gpu_provider.training.telemetry import Telemetry
from tests.inventory.fake_nvml import FakeNvml, Part, slice_of

UNKNOWN = {"gpu_pct": None, "gpu_memory_mib": None, "gpu_memory_total_mib": None}


def gauge(driver: FakeNvml, uuid: str) -> ProcessGauge:
    return ProcessGauge(uuid, NvmlSession(lambda: driver))


def of_device(gauge: ProcessGauge) -> dict[str, object]:
    return {name: value for name, value in gauge.read().items() if name.startswith("gpu")}


def test_a_shard_tells_the_load_and_memory_of_its_own_device_without_what_the_driver_reserves() -> None:
    driver = FakeNvml(Part("GPU-a", busy=1), Part("GPU-b", busy=93, used_mib=2048, total_mib=81920))
    read = gauge(driver, "GPU-b").read()
    assert (read["gpu_pct"], read["gpu_memory_mib"], read["gpu_memory_total_mib"]) == (93.0, 2048, 81920)
    assert isinstance(read["memory_mib"], float), "beside what the kernel tells of the process"


def test_a_slice_has_memory_but_no_load_of_its_own() -> None:
    driver = FakeNvml(Part("GPU-a", slices=[slice_of("MIG-1", count=1, total_mib=9728)]))
    assert of_device(gauge(driver, "MIG-1")) == {
        "gpu_pct": None,
        "gpu_memory_mib": 1024,
        "gpu_memory_total_mib": 9728,
    }


def test_an_old_driver_tells_memory_in_the_old_way() -> None:
    class OldNvml(FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, part: Part, version: int | None = None) -> object:
            if version is not None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            return super().nvmlDeviceGetMemoryInfo(part)

    assert of_device(gauge(OldNvml(Part("GPU-a", used_mib=100)), "GPU-a"))["gpu_memory_mib"] == 600


@pytest.mark.parametrize(
    "driver", [FakeNvml(), FakeNvml(Part("GPU-a", refuses={"nvmlDeviceGetMemoryInfo": 15}))]
)
def test_what_the_driver_does_not_tell_is_unknown_and_never_zero(driver: FakeNvml) -> None:
    assert of_device(gauge(driver, "GPU-a")) == UNKNOWN


def test_a_driver_that_comes_late_or_was_restarted_is_started_again() -> None:
    driver = FakeNvml(Part("GPU-a"))
    driver.init_error = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    tells = gauge(driver, "GPU-a")
    assert of_device(tells) == UNKNOWN
    driver.init_error = None
    assert of_device(tells)["gpu_pct"] == 37.0
    driver.boards[0].refuses["nvmlDeviceGetHandleByUUID"] = pynvml.NVML_ERROR_UNINITIALIZED
    assert of_device(tells) == UNKNOWN
    driver.boards[0].refuses.clear()
    assert of_device(tells)["gpu_pct"] == 37.0 and driver.inits == 2


def test_the_line_of_a_shard_on_a_gpu_has_the_numbers_of_the_device_that_it_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeNvml(Part("GPU-a"), Part("GPU-b", busy=64))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    monkeypatch.setattr(process_gauge, "NvmlSession", lambda: NvmlSession(lambda: driver))
    monkeypatch.setattr("airflow_gpu_provider.training.telemetry._GAUGE_EVERY_S", 0.0)
    monkeypatch.setattr("airflow_gpu_provider.training.telemetry.Meter.on", lambda device: _host_meter())
    telemetry = Telemetry(tmp_path / "u0.jsonl", "u0", device=torch.device("cuda", 0))
    telemetry.report(0, 5, {"loss": 0.5})
    telemetry.flush()
    (line,) = [line for line in read_telemetry(tmp_path) if line["kind"] == "gauge"]
    assert (line["shard"], line["step"], line["gpu_pct"], line["gpu_memory_mib"]) == (0, 5, 64.0, 1024)


def _host_meter() -> object:
    from airflow_gpu_provider.training.meter import HostClock, Meter

    return Meter(HostClock())
