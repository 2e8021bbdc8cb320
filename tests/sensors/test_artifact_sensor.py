"""An artifact counts as there only when it is complete, and a wait says what it waits for."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout, TaskDeferred

from airflow_gpu_provider.sensors.artifact_state import ArtifactWatch
from airflow_gpu_provider.sensors.artifacts import ArtifactSensor
from airflow_gpu_provider.triggers.artifacts import ArtifactTrigger


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset"
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "train.bin").write_bytes(b"text")
    return folder


def looks(path: Path, times: int = 2) -> list[list[str]]:
    watch = ArtifactWatch([str(path)])
    return [watch.look() for _ in range(times)]


def test_an_unmarked_folder_is_complete_when_two_looks_are_equal(dataset: Path) -> None:
    first, second = looks(dataset)
    assert "a second look" in first[0]
    assert second == []


def test_a_single_file_is_an_artifact_too(dataset: Path) -> None:
    assert looks(dataset / "part" / "train.bin")[-1] == []


def test_a_file_that_grows_is_still_changing(dataset: Path) -> None:
    watch = ArtifactWatch([str(dataset)])
    watch.look()
    (dataset / "part" / "train.bin").write_bytes(b"more text")
    assert "is still changing" in watch.look()[0]
    assert watch.look() == []


def test_a_file_rewritten_with_the_same_size_is_still_changing(dataset: Path) -> None:
    watch = ArtifactWatch([str(dataset)])
    watch.look()
    os.utime(dataset / "part" / "train.bin", ns=(1, 1))
    assert "is still changing" in watch.look()[0]


@pytest.mark.parametrize("name", ["weights.pt.tmp", "shard-1.incomplete", "a.part"])
def test_a_file_that_is_being_written_is_named_even_beside_a_marker(dataset: Path, name: str) -> None:
    (dataset / "_SUCCESS").touch()
    (dataset / "part" / name).write_bytes(b"half")
    assert all(name in look[0] and "still being written" in look[0] for look in looks(dataset, 3))


def test_empty_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "marked").mkdir()
    (tmp_path / "marked" / "_SUCCESS").touch()
    for name in ("folder", "file", "marked"):
        assert "is empty" in looks(tmp_path / name)[-1][0]


def test_a_missing_path_says_how_far_it_exists(tmp_path: Path) -> None:
    assert looks(tmp_path / "data" / "sets" / "wikitext")[-1] == [
        f"{tmp_path}/data/sets/wikitext does not exist (only {tmp_path} does)"
    ]


def test_a_success_marker_needs_no_second_look(dataset: Path) -> None:
    (dataset / "_SUCCESS").touch()
    assert looks(dataset, 1) == [[]]


def write_manifest(folder: Path, content: bytes = b"text") -> None:
    digest = hashlib.sha256(content).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{digest}  part/train.bin\n")


def test_a_manifest_that_fits_needs_no_second_look(dataset: Path) -> None:
    write_manifest(dataset)
    assert looks(dataset, 1) == [[]]


def test_a_manifest_that_does_not_fit_is_never_complete(dataset: Path) -> None:
    write_manifest(dataset, b"other text")
    assert all("does not fit its SHA256SUMS" in look[0] for look in looks(dataset, 3))
    write_manifest(dataset)
    (dataset / "part" / "train.bin").rename(dataset / "part" / "valid.bin")
    assert "lacks part/train.bin" in looks(dataset)[-1][0]
    (dataset / "SHA256SUMS").write_text("nonsense\n")
    assert "line 1" in looks(dataset)[-1][0]


# -- the sensor


def test_the_sensor_defers_with_what_is_left_of_its_paths_and_its_deadline(tmp_path: Path) -> None:
    sensor = ArtifactSensor(
        task_id="s", paths=[str(tmp_path / "x")], deferrable=True, poke_interval=3, timeout=120
    )
    with pytest.raises(TaskDeferred) as deferred:
        sensor.execute({})
    trigger = deferred.value.trigger
    assert isinstance(trigger, ArtifactTrigger)
    path, arguments = trigger.serialize()
    assert path == "airflow_gpu_provider.triggers.artifacts.ArtifactTrigger"
    assert arguments == {"paths": [str(tmp_path / "x")], "poke_interval": 3.0}
    assert deferred.value.timeout is not None and deferred.value.timeout.total_seconds() == 120
    assert ArtifactTrigger(**arguments).serialize() == (path, arguments)


def test_the_sensor_goes_on_at_once_when_all_is_marked_complete(dataset: Path) -> None:
    (dataset / "_SUCCESS").touch()
    ArtifactSensor(task_id="s", paths={"dataset": str(dataset)}, deferrable=True).execute({})


def test_the_sensor_waits_in_the_worker_until_its_deadline(tmp_path: Path, dataset: Path) -> None:
    ArtifactSensor(task_id="s", paths=str(dataset), deferrable=False, poke_interval=0.01, timeout=30).execute(
        {}
    )
    waiting = ArtifactSensor(
        task_id="s", paths=str(tmp_path / "x"), deferrable=False, poke_interval=0.01, timeout=0.05
    )
    with pytest.raises(AirflowSensorTimeout):
        waiting.execute({})


@pytest.mark.parametrize("paths", ["data/x", [], "", ["/ok", "relative"]])
def test_paths_that_cannot_be_waited_for_fail_without_retry(paths: Any) -> None:
    with pytest.raises(AirflowFailException, match="absolute paths"):
        ArtifactSensor(task_id="s", paths=paths, deferrable=True).execute({})


def test_the_trigger_fires_when_the_artifact_arrives_and_says_why_it_waited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model"

    async def watch() -> dict[str, Any]:
        trigger = ArtifactTrigger([str(target)], poke_interval=0.01)
        events = trigger.run()
        arrival = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.1)
        assert not arrival.done()
        (tmp_path / "model.tmp").mkdir()
        (tmp_path / "model.tmp" / "weights").write_bytes(b"1")
        (tmp_path / "model.tmp").rename(target)
        return dict((await asyncio.wait_for(arrival, 20)).payload)

    assert asyncio.run(watch()) == {"paths": [str(target)]}
    told = capsys.readouterr().out  # where Airflow's loggers go
    assert "does not exist" in told and "a second look" in told
