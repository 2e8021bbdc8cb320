"""The folder of a training over several tries, and the files that are read while they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.measurements import read_telemetry
from airflow_gpu_provider.training.plan import check_entrypoint
from airflow_gpu_provider.training.run_folder import RunFolder, folder_name


def test_a_retry_finds_the_checkpoints_of_the_try_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "t")
    first = planned(folder, 1)
    folder.checkpoints.mkdir()
    (folder.checkpoints / "step-1.json").write_text("{}")
    folder.mark_delivered(first, '{"loss": 1}', "tries")
    second = RunFolder(tmp_path / "t").open_attempt(2, "tries")
    assert first != second
    assert (folder.checkpoints / "step-1.json").exists()


def test_a_task_cleared_after_its_success_starts_anew_and_keeps_the_old_checkpoints_aside(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path / "t")
    first = planned(folder, 1)
    folder.checkpoints.mkdir()
    (folder.checkpoints / "step-1.json").write_text("{}")
    folder.mark_delivered(first, '{"loss": 1}', "tries before")
    folder.open_attempt(2, "tries")  # killed before it had a plan
    assert not folder.checkpoints.exists()
    assert (tmp_path / "t" / "previous" / "step-1.json").exists()
    assert folder.last_attempt() == first and folder.is_over(first, "tries"), "nobody hands it over again"
    second = planned(folder, 3)
    assert (tmp_path / "t" / "previous" / "step-1.json").exists()
    folder.checkpoints.mkdir()
    assert folder.last_attempt() == second and not folder.is_over(second, "tries")
    folder.open_attempt(4, "tries")
    assert folder.checkpoints.exists(), "a retry of it does not start anew again"


def planned(folder: RunFolder, number: int) -> Path:
    attempt = folder.open_attempt(number, "tries")
    (attempt / "plan.json").write_text("{}")
    return attempt


def test_a_place_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"checkpoint_dir='.*file' cannot be used"):
        RunFolder(tmp_path / "file").open_attempt(1, "tries")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("manual__2026-01-01T00:00:00+00:00", "manual__2026-01-01T00_00_00+00_00"),
        ("../../etc", "_.._etc"),
        ("..", "_"),
    ],
)
def test_ids_become_harmless_folder_names(text: str, name: str) -> None:
    assert folder_name(text) == name


@pytest.mark.parametrize("text", ["train", "a.b", "a:b:c", "a/b:c", "a.b:", ":f", "a.b:f()", ""])
def test_an_entrypoint_that_names_no_function_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"package\.module:function"):
        check_entrypoint(text)


def test_a_line_that_a_killed_process_left_half_written_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "u0.jsonl"
    file.write_text(
        '{"at": 2, "kind": "report", "loss": 0.5}\n{"at": 3, "kind": "sync"}\n{"at": 4, "kind": "rep'
    )
    (tmp_path / "u1.jsonl").write_text('{"at": 1, "kind": "report", "loss": 0.7}\n')
    assert [line["at"] for line in read_telemetry(tmp_path)] == [1, 2, 3]
