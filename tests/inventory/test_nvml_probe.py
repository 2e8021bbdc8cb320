"""The real probe over a driver faked at its functions."""

from __future__ import annotations

import os

import pynvml
import pytest
from fake_nvml import FakeNvml, Part, slice_of

from airflow_gpu_provider.inventory.nvml import NvmlProbe
from airflow_gpu_provider.inventory.nvml_session import NvmlOff, NvmlSession
from airflow_gpu_provider.reports import DeviceReport, NodeReport

EVERY_MEASUREMENT = (
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceRegisterEvents",
)


def probe_of(nvml: FakeNvml) -> NvmlProbe:
    return NvmlProbe("node-a", host_name="host-a", session=NvmlSession(lambda: nvml))


def read(probe: NvmlProbe) -> NodeReport:
    (node,) = probe.read()
    return node


def by_id(node: NodeReport) -> dict[str, DeviceReport]:
    return {device.id: device for device in node.devices}


def test_a_device_is_reported_with_its_measurements_and_canonical_model() -> None:
    node = read(probe_of(FakeNvml(Part("GPU-1", pids=(12, 7)))))
    (device,) = node.devices
    assert (node.name, node.host, node.labels) == ("node-a", "host-a", {})
    assert node.cpu_cores >= 1 and node.memory_mib > 0
    assert device == DeviceReport(
        id="GPU-1",
        model="A100",
        memory_mib=81920,
        tflops=35,
        utilisation=0.37,
        memory_used_mib=1024,
        temperature_c=41,
        power_w=61.5,
        ecc_uncorrected=0,
        foreign_pids=(7, 12),
    )


def test_devices_are_named_by_uuid_whatever_their_order() -> None:
    fast, slow = Part("GPU-fast"), Part("GPU-slow", name="Tesla V100-SXM2-32GB", total_mib=32768)
    one, other = read(probe_of(FakeNvml(slow, fast))), read(probe_of(FakeNvml(fast, slow)))
    assert by_id(one) == by_id(other)
    assert by_id(one)["GPU-slow"].model == "V100"


def test_an_unsupported_field_is_unknown_and_never_zero() -> None:
    part = Part("GPU-1", refuses=dict.fromkeys(EVERY_MEASUREMENT, pynvml.NVML_ERROR_NOT_SUPPORTED))
    node = read(probe_of(FakeNvml(part)))
    (device,) = node.devices
    unknown = (
        device.utilisation,
        device.memory_used_mib,
        device.temperature_c,
        device.power_w,
        device.ecc_uncorrected,
    )
    assert unknown == (None,) * 5
    assert device.suspect is None
    assert device.memory_mib == node.memory_mib  # unified memory: the machine's


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION])
def test_an_old_driver_or_a_missing_right_is_no_fault_of_the_device(code: int) -> None:
    (device,) = read(probe_of(FakeNvml(Part("GPU-1", refuses={"nvmlDeviceGetTotalEccErrors": code})))).devices
    assert device.ecc_uncorrected is None and device.suspect is None
    assert device.utilisation == 0.37


def test_slices_are_the_leaves_of_a_split_board() -> None:
    slices = [slice_of("MIG-a", count=3, total_mib=40_192), slice_of("MIG-b", count=1, total_mib=9_856)]
    devices = by_id(read(probe_of(FakeNvml(Part("GPU-split", slices=slices), Part("GPU-whole")))))
    assert set(devices) == {"MIG-a", "MIG-b", "GPU-whole"}
    assert [devices[name].model for name in ("MIG-a", "MIG-b")] == ["A100-MIG-3g.39gb", "A100-MIG-1g.10gb"]
    assert devices["GPU-whole"].model == "A100"
    assert [devices[name].share for name in ("MIG-a", "GPU-whole")] == [pytest.approx(3 / 7), 1.0]
    assert devices["MIG-a"].tflops == pytest.approx(35 * 3 / 7)
    assert devices["MIG-b"].memory_mib == 9_856
    assert devices["MIG-a"].utilisation is None and devices["MIG-a"].power_w is None
    assert devices["MIG-a"].temperature_c == 41


def test_a_slice_that_does_not_say_its_profile_is_named_by_its_size() -> None:
    nameless = slice_of("MIG-a", count=2, total_mib=19_968, name="NVIDIA A100-SXM4-80GB")
    unknown = slice_of("MIG-b", count=2, total_mib=19_968, name="NVIDIA A100-SXM4-80GB")
    unknown.refuses["nvmlDeviceGetAttributes"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    devices = by_id(read(probe_of(FakeNvml(Part("GPU-split", slices=[nameless, unknown])))))
    assert [devices[name].model for name in ("MIG-a", "MIG-b")] == ["A100-MIG-2g.20gb", "A100-MIG-unknown"]


def test_who_computes_through_mps_is_seen() -> None:
    board = Part("GPU-1", pids=(10,), mps_pids=(11, 12))
    assert by_id(read(probe_of(FakeNvml(board))))["GPU-1"].foreign_pids == (10, 11, 12)


def test_a_split_board_without_slices_offers_nothing() -> None:
    assert read(probe_of(FakeNvml(Part("GPU-split", slices=[])))).devices == ()


def test_a_removed_slice_is_forgotten() -> None:
    board = Part("GPU-split", slices=[slice_of("MIG-a", count=3, total_mib=40_000)])
    probe = probe_of(FakeNvml(board))
    assert set(by_id(read(probe))) == {"MIG-a"}
    board.slices = None
    assert set(by_id(read(probe))) == {"GPU-split"}


def test_all_devices_are_reported_when_one_is_leased() -> None:
    probe = probe_of(FakeNvml(*(Part(f"GPU-{n}") for n in range(8))))
    (node,) = probe.read({"GPU-3": frozenset({"lease-1"})})
    assert len(node.devices) == 8


def test_a_device_that_the_driver_lost_stays_in_the_report_as_suspect() -> None:
    nvml = FakeNvml(Part("GPU-1"), Part("GPU-2"))
    probe = probe_of(nvml)
    read(probe)
    nvml.lost.add(0)
    for _ in range(2):
        devices = by_id(read(probe))
        assert "GPU is lost" in (devices["GPU-1"].suspect or "")
        assert devices["GPU-1"].utilisation is None
        assert devices["GPU-1"].memory_mib == 81920
        assert devices["GPU-2"].suspect is None
    nvml.lost.clear()
    assert by_id(read(probe))["GPU-1"].suspect is None


def test_a_device_lost_in_the_middle_of_a_read_is_suspect() -> None:
    part = Part("GPU-1")
    probe = probe_of(FakeNvml(part))
    read(probe)
    part.refuses["nvmlDeviceGetUtilizationRates"] = pynvml.NVML_ERROR_GPU_IS_LOST
    (device,) = read(probe).devices
    assert "GPU is lost" in (device.suspect or "")


@pytest.mark.parametrize(
    ("fault", "words"),
    [({"ecc": 2}, "uncorrectable ECC: 2"), ({"rows": (0, 1, 0, 1)}, "memory row")],
)
def test_a_failing_memory_makes_the_device_suspect(fault: dict[str, object], words: str) -> None:
    (device,) = read(probe_of(FakeNvml(Part("GPU-1", **fault)))).devices  # type: ignore[arg-type]
    assert words in (device.suspect or "")


def test_a_hardware_xid_marks_its_board_until_nvml_is_started_again() -> None:
    sick, well = Part("GPU-1"), Part("GPU-2")
    nvml = FakeNvml(sick, well)
    probe = probe_of(nvml)
    nvml.events = [(well, 31), (sick, 79)]
    for _ in range(2):
        devices = by_id(read(probe))
        assert "XID 79" in (devices["GPU-1"].suspect or "")
        assert devices["GPU-2"].suspect is None, "31 is a program's fault"
    probe.close()
    assert by_id(read(probe))["GPU-1"].suspect is None


def test_a_missing_binding_is_said() -> None:
    def load() -> FakeNvml:
        raise ImportError("No module named 'pynvml'")

    session = NvmlSession(load)
    assert session.ensure() is NvmlOff.NOT_INSTALLED
    assert "install nvidia-ml-py" in NvmlOff.NOT_INSTALLED.sentence


@pytest.mark.parametrize(
    ("code", "off", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, NvmlOff.LIBRARY_MISSING, "no NVML: library not found"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, NvmlOff.DRIVER_MISSING, "no NVML: driver not loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, NvmlOff.DRIVER_TOO_OLD, "update the driver"),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, NvmlOff.DRIVER_TOO_OLD, "update the driver"),
        (pynvml.NVML_ERROR_NO_PERMISSION, NvmlOff.NO_PERMISSION, "no permission"),
        (pynvml.NVML_ERROR_UNKNOWN, NvmlOff.FAILED, "no NVML"),
    ],
)
def test_the_node_says_why_nvml_is_off(code: int, off: NvmlOff, words: str) -> None:
    nvml = FakeNvml(Part("GPU-1"))
    nvml.init_error = code
    probe = probe_of(nvml)
    node = read(probe)
    assert probe.off is off
    assert node.devices == () and words in node.labels["nvml"]
    nvml.init_error = None
    assert len(read(probe).devices) == 1, "a driver that comes later is found"


def test_devices_stay_known_while_the_driver_restarts() -> None:
    nvml = FakeNvml(Part("GPU-1"))
    probe = probe_of(nvml)
    read(probe)
    nvml.nvmlDeviceGetCount = _raises(pynvml.NVML_ERROR_UNINITIALIZED)  # type: ignore[method-assign]
    nvml.init_error = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    read(probe)
    node = read(probe)
    assert probe.off is NvmlOff.DRIVER_MISSING
    assert "driver not loaded" in (node.devices[0].suspect or "")


def _raises(code: int) -> object:
    def call() -> int:
        raise pynvml.NVMLError(code)

    return call


def test_a_forked_process_starts_nvml_again(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(Part("GPU-1"))
    session = NvmlSession(lambda: nvml)
    probe = NvmlProbe("node-a", session=session)
    read(probe)
    read(probe)
    assert nvml.inits == 1
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert session.off is NvmlOff.FORKED
    session.close()
    assert nvml.shutdowns == 0, "the child must not shut down what the parent uses"
    assert len(read(probe).devices) == 1
    assert session.off is None and nvml.inits == 2
