"""The state on disk: nothing is lost, nothing half-written is used, and a full disk does no harm."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.checkpoint import CheckpointFolder, CheckpointNotWritten
from airflow_gpu_provider.training.checkpoint_files import CheckpointFacts, CheckpointFiles
from airflow_gpu_provider.training.failures import FailureCause
from airflow_gpu_provider.training.run_file import RunState
from airflow_gpu_provider.training.state import TrainingState
from tests.training.oracle import expected_weights
from tests.training.running import Running
from tests.training.test_training_state import new_state, step

FACTS = CheckpointFacts(shard_count=2, sync_interval=10, seed=0)


def big_state(mib: float) -> TrainingState:
    """Return a state of about ``mib`` MiB."""
    model = nn.Linear(1, int(mib * 2**20 / 8))
    return TrainingState([model], [torch.optim.SGD(model.parameters(), lr=0.1)])


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints", FACTS, keep=2)


def test_a_checkpoint_brings_back_every_bit_and_only_the_newest_are_kept(folder: CheckpointFolder) -> None:
    state = new_state()
    for done in (1, 2, 3):
        step(state)
        folder.save(state, done)
    newest = folder.newest()
    assert newest is not None and newest.step == 3 and newest.state_sha256 == state.digest()
    assert sorted(path.name for path in folder.folder.iterdir()) == [
        "step-000000000002.json",
        "step-000000000002.pt",
        "step-000000000003.json",
        "step-000000000003.pt",
    ]
    fresh = new_state()
    folder.load(fresh, newest)
    assert fresh.digest() == state.digest()


@pytest.mark.parametrize("damage", ["cut", "flip", "lost", "record"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    folder: CheckpointFolder, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    state = new_state()
    folder.save(state, 1)
    newest = folder.save(state, 2)
    file = Path(newest.path)
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[:-10])
    elif damage == "flip":
        file.write_bytes(content[:-10] + bytes([content[-10] ^ 1]) + content[-9:])
    elif damage == "lost":
        file.unlink()
    else:
        file.with_suffix(".json").write_text("{")
    with caplog.at_level(logging.WARNING):
        found = folder.newest()
    assert found is not None and found.step == 1
    assert "trying the one before" in caplog.text


def test_a_damaged_newer_checkpoint_never_costs_the_whole_one_that_was_just_written(tmp_path: Path) -> None:
    state, folder = new_state(), CheckpointFolder(tmp_path, FACTS, keep=1)
    torn = Path(folder.save(state, 1000).path)
    torn.write_bytes(torn.read_bytes()[:-10])
    folder.save(state, 950)
    found = folder.newest()
    assert found is not None and found.step == 950
    assert len(list(tmp_path.iterdir())) == 2, "data and record of one"


def test_a_crash_while_writing_leaves_no_checkpoint(folder: CheckpointFolder) -> None:
    folder.save(new_state(), 1)
    (folder.folder / "step-000000000009.77.tmp").write_bytes(b"half")
    (folder.folder / "step-000000000009.pt").write_bytes(b"its record was never written")
    found = folder.newest()
    assert found is not None and found.step == 1


def test_a_copy_is_written_in_the_background_while_training_goes_on(folder: CheckpointFolder) -> None:
    state = new_state()
    step(state)
    digest = state.digest()
    assert folder.save_in_background(state, 1)
    step(state, 5)
    folder.save(state, 6)  # waits for the thread
    written = folder.take_written()
    assert written is not None and (written.step, written.state_sha256) == (1, digest)
    fresh = new_state()
    folder.load(fresh, written)
    assert fresh.digest() == digest and folder.take_written() is None


def test_a_checkpoint_of_another_model_is_refused(folder: CheckpointFolder) -> None:
    record = folder.save(new_state(), 1)
    with pytest.raises(InvalidRequest, match=r"another model.*checkpoint_dir of its own"):
        folder.load(new_state(width=5), record)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointNotWritten, match=r"step 1 could not be written to .*/file/x"):
        CheckpointFolder(tmp_path / "file" / "x", FACTS, keep=1).save(new_state(), 1)


def test_going_on_with_another_number_of_shards_is_told(
    folder: CheckpointFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.save(new_state(), 1)
    other = CheckpointFolder(folder.folder, FACTS.model_copy(update={"shard_count": 4}), keep=2)
    with caplog.at_level(logging.WARNING):
        assert other.newest() is not None
    assert "shard_count=4" in caplog.text and "dealt out differently" in caplog.text


# -- little space


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the system refuse larger files to this process, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 5 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"may not mount a small file system: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_what_could_not_be_written_is_told_in_numbers_and_the_one_before_stays(tmp_path: Path) -> None:
    told: list[str] = []
    folder = CheckpointFolder(tmp_path, FACTS, keep=2, tell=told.append)
    state = big_state(1)
    folder.save(state, 1)
    with largest_file(2**19):
        for number in (2, 3):  # told once, not at every try
            assert folder.save_in_background(state, number)
            with pytest.raises(CheckpointNotWritten, match=r"step 9 .*needed: 1\.\d MiB, free: \d+\.\d MiB"):
                folder.save(state, 9)
    (sentence,) = told
    assert "step 2 could not be written" in sentence and "File too large" in sentence
    assert "step-000000000001, is kept" in sentence and "Training goes on" in sentence
    newest = folder.newest()
    assert newest is not None and newest.step == 1
    assert not list(tmp_path.glob("*.tmp")), "half a file would take the space that is missing"
    folder.save_in_background(state, 4)
    folder.save(state, 5)
    assert told[1:] == ["Checkpoints can be written again: that of step 4 is"]


def test_on_a_full_disk_older_checkpoints_make_room_and_the_newest_whole_one_never_does(
    small_disk: Path,
) -> None:
    told: list[str] = []
    folder = CheckpointFolder(small_disk, FACTS, keep=9, tell=told.append)
    state = big_state(1.2)
    for number in range(1, 8):
        folder.save(state, number)
    steps = [int(path.stem[5:]) for path in CheckpointFiles(small_disk).record_files()]
    assert steps[0] == 7 and len(steps) == 3, "as many as fit"
    assert [sentence.partition("the checkpoint ")[2][:17] for sentence in told] == [
        f"step-{n:012d}" for n in (1, 2, 3, 4)
    ]

    with pytest.raises(CheckpointNotWritten, match=r"No space left on device.*needed: 4\.2 MiB, free: 3"):
        folder.save(big_state(4), 8)
    newest = folder.newest()
    assert newest is not None and newest.step == 7


def test_what_a_killed_writer_left_is_removed_once_it_is_old(folder: CheckpointFolder) -> None:
    state = new_state()
    folder.save(state, 1)
    old, young = folder.folder / "step-000000000002.7.tmp", folder.folder / "step-000000000003.8.tmp"
    half = folder.folder / "step-000000000004.pt"  # its record was never written
    for file in (old, young, half):
        file.write_bytes(b"half")
    for file in (old, half):
        os.utime(file, (time.time() - 120,) * 2)
    folder.save(state, 5)
    assert not old.exists() and not half.exists() and young.exists()


def test_a_full_disk_leaves_a_run_alone_until_its_last_step_and_loses_nothing_then(
    training: Callable[..., Running],
) -> None:
    first = training(params={"disk_full": [15, -1], "pause_s": 0.02})
    failed = first.end()
    assert failed.state is RunState.FAILED and not failed.hopeless, "a retry resumes"
    assert failed.failures[0].step == 60, "it trained to its end"
    assert failed.checkpoint is not None and failed.checkpoint.step == 10
    assert [failure.cause for failure in failed.failures] == [FailureCause.STORAGE]
    for word in (
        "step 60 could not be written",
        "File too large",
        "needed: 0.",
        "free: ",
        "keep_checkpoints",
    ):
        assert word in str(failed.error)
    (note,) = failed.notes
    assert "step 20 could not be written" in note.sentence and "Training goes on" in note.sentence

    # Space comes back in the middle of the retry.
    record = training(attempt="try-2", params={"disk_full": [15, 35], "pause_s": 0.02}).end()
    assert record.resumed_from == 10 and record.state is RunState.SUCCEEDED
    assert "can be written again" in record.notes[-1].sentence
    assert record.checkpoint is not None and record.checkpoint.state_sha256 == expected_weights(10)


def test_a_torn_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(
    training: Callable[..., Running],
) -> None:
    first = training(params={"raise_at": 55, "pause_s": 0.02}, keep_checkpoints=3)
    first.end()
    newest, before, *_ = CheckpointFiles(first.plan.checkpoint_dir).record_files()
    data = newest.with_suffix(".pt")
    data.write_bytes(data.read_bytes()[:-100])
    record = training(attempt="try-2").end()
    assert record.resumed_from == int(before.stem[5:])
    assert data.name in record.notes[0].sentence and "trying the one before" in record.notes[0].sentence
    assert record.checkpoint is not None and record.checkpoint.state_sha256 == expected_weights(10)
