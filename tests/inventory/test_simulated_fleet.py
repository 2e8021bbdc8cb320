"""The fleet for people without GPUs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.inventory.fleet_spec import EXAMPLES, parse_fleet
from airflow_gpu_provider.inventory.simulated import SimulatedProbe, simulated_id
from airflow_gpu_provider.reports import DeviceReport


def fleet(text: str) -> list[tuple[str, list[tuple[str, int]]]]:
    nodes = parse_fleet(text, base_name="host")
    return [(node.name, [(each.model, each.memory_mib) for each in node.devices]) for node in nodes]


def probe_of(text: str, **options: Path) -> SimulatedProbe:
    return SimulatedProbe(parse_fleet(text, base_name="host"), host_name="host", **options)


def device_of(probe: SimulatedProbe, index: int = 0, **leases: str) -> DeviceReport:
    held = {device.replace("_", "-"): frozenset({lease}) for device, lease in leases.items()}
    return probe.read(held)[0].devices[index]


def test_a_list_of_devices_is_one_node_named_after_the_machine() -> None:
    assert fleet("2xA100-80GB,1xV100-32GB") == [
        ("host", [("A100", 81920), ("A100", 81920), ("V100", 32768)]),
    ]


def test_nodes_can_be_named() -> None:
    assert fleet(" node-a: 2 x A100-40GB ; node-b:1xV100-16GB ") == [
        ("node-a", [("A100", 40960)] * 2),
        ("node-b", [("V100", 16384)]),
    ]


def test_a_count_makes_equal_nodes_with_sortable_names() -> None:
    nodes = fleet("64x(8xA100-80GB)")
    assert len(nodes) == 64 and {len(devices) for _, devices in nodes} == {8}
    assert [nodes[0][0], nodes[63][0]] == ["host-01", "host-64"]
    assert [name for name, _ in fleet("2x(1xA100);fast:2x(1xH100)")] == [
        "host-1-1",
        "host-1-2",
        "fast-1",
        "fast-2",
    ]


def test_memory_is_the_models_usual_one_when_it_is_not_given() -> None:
    ((_, devices),) = fleet("1xA100,1xV100")
    assert [model for model, _ in devices] == ["A100", "V100"]
    assert all(memory > 0 for _, memory in devices)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        (" ; ", "empty"),
        ("A100", "COUNTxMODEL"),
        ("two x A100", "COUNTxMODEL"),
        ("2xA100-80", "COUNTxMODEL"),
        ("2xA100,", "COUNTxMODEL"),
        ("-1xA100", "COUNTxMODEL"),
        ("0xA100", "0 devices"),
        ("999999999xA100", "devices"),
        ("99999x(8xA100)", "more than"),
        ("0x(8xA100)", "0 nodes"),
        ("2xA100-0GB", "no memory"),
        ("2xB9000-80GB", "no known model"),
        ("a:1xA100;a:1xV100", "used twice"),
        ("a:b:1xA100", "NAME"),
        ("2x(1xA100", "NAME"),
    ],
)
def test_a_wrong_fleet_is_refused_with_what_is_wrong_and_an_example(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_fleet(text, base_name="host")
    assert words in caught.value.message and EXAMPLES in caught.value.message


def test_ids_depend_only_on_the_place() -> None:
    first, again = probe_of("a:2xA100;b:2xV100"), probe_of("a:2xA100;b:2xV100")
    ids = [device.id for node in first.read() for device in node.devices]
    assert ids == [device.id for node in again.read() for device in node.devices]
    assert len(set(ids)) == 4 and all(each.startswith("GPU-sim-") for each in ids)
    assert ids[0] == simulated_id("host", "a", 0)
    assert simulated_id("other", "a", 0) != ids[0]


def test_a_simulated_device_says_so_and_its_node_has_room() -> None:
    (node,) = probe_of("2xA100-80GB,2xV100-32GB").read()
    assert all(device.simulated for device in node.devices)
    assert [device.tflops for device in node.devices] == [35, 35, 15, 15]
    assert (node.host, node.load, node.labels) == ("host", None, {"simulated": "true"})
    assert node.cpu_cores >= 4 and node.memory_mib >= 81920


def test_a_leased_device_looks_busy_and_all_others_stay_in_the_report() -> None:
    probe = probe_of("8xA100")
    (node,) = probe.read({simulated_id("host", "host", 3): "lease-1"})
    busy = [device.utilisation for device in node.devices]
    assert len(busy) == 8
    assert (busy[3] or 0) > 0.5 and sum(use or 0 for use in busy) == busy[3]
    assert device_of(probe, 3).utilisation == 0.0


def write(path: Path, content: object, *, at: int) -> None:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    os.utime(path, ns=(at, at))


def test_faults_are_taken_from_a_file_that_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    faults = tmp_path / "faults.json"
    probe = probe_of("1xA100", faults=faults)
    own = simulated_id("host", "host", 0)
    assert device_of(probe).suspect is None
    write(faults, {own: {"suspect": "uncorrectable ECC", "foreign_pids": [7], "utilisation": None}}, at=1)
    broken = device_of(probe)
    assert (broken.suspect, broken.foreign_pids, broken.utilisation) == ("uncorrectable ECC", (7,), None)
    write(faults, '{"half a fi', at=2)
    assert device_of(probe).suspect == "uncorrectable ECC", "what cannot be read changes nothing"
    write(faults, {own: {"suspekt": "typing error"}}, at=3)
    assert device_of(probe).suspect == "uncorrectable ECC"
    assert "suspekt" in caplog.text
    device_of(probe)
    assert caplog.text.count("suspekt") == 1, "a wrong file is told once"
    faults.unlink()
    assert device_of(probe).suspect is None


def test_a_silent_node_is_left_out_as_if_its_machine_had_died(tmp_path: Path) -> None:
    faults = tmp_path / "faults.json"
    write(faults, {"b": {"silent": True}}, at=1)
    assert [node.name for node in probe_of("a:1xA100;b:1xV100", faults=faults).read()] == ["a"]
