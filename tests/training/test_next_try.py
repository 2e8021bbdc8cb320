"""What a try that failed means for the redundancy of the next one: the rule, and reading what it left."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_provider.training.failures import FailureCause, ShardFailure
from airflow_gpu_provider.training.next_try import LastTry, last_try, note_lost_lease, shards_missed
from airflow_gpu_provider.training.run_file import RunRecord, RunState, write_record
from airflow_gpu_provider.training.run_folder import RunFolder
from tests.training.running import make_plan


def failure(cause: FailureCause = FailureCause.KILLED, rank: int | None = 0) -> ShardFailure:
    return ShardFailure(uid="u0", rank=rank, step=7, cause=cause, evidence="why")


def record(state: RunState = RunState.FAILED, *failures: ShardFailure, **fields: Any) -> RunRecord:
    now = datetime.now(timezone.utc)
    return RunRecord(
        run_id="r",
        pid=1,
        state=state,
        failures=list(failures),
        started_at=now,
        updated_at=now,
        **{"error": "why", **fields},
    )


@pytest.mark.parametrize(
    ("last", "more", "words"),
    [
        (record(RunState.FAILED, failure()), 1, "1 shard(s) found no spare, the last: shard 0"),
        (record(RunState.FAILED, failure(), failure(), failure(), takeovers=["a"]), 2, "2 shard(s)"),
        (record(RunState.FAILED, failure(FailureCause.GPU_FAULT)), 1, "gpu_fault"),
        (record(RunState.FAILED, failure(FailureCause.OUT_OF_MEMORY)), 0, "would have met the same"),
        (record(RunState.FAILED, failure(FailureCause.STORAGE)), 0, "would have met the same"),
        (record(RunState.FAILED, failure(FailureCause.USER_ERROR), hopeless=True), 0, "met the same"),
        (record(RunState.FAILED, failure(), takeovers=["a"]), 0, "no shard was missing"),
        (record(RunState.FAILED, failure(rank=None)), 0, "no shard was missing"),
        (record(RunState.STOPPED), 0, "asked to stop"),
        (record(RunState.STOPPED, orphaned=True), 1, "broke off"),
        (record(RunState.RUNNING), 1, "broke off"),
        (None, 1, "broke off"),
    ],
)
def test_only_losses_that_spares_would_have_answered_ask_for_more_of_them(
    last: RunRecord | None, more: int, words: str
) -> None:
    found, reason = shards_missed(last, lease_lost=False)
    assert found == more
    assert words in reason


def test_a_lost_lease_asks_for_nothing_whatever_the_record_says() -> None:
    assert shards_missed(record(RunState.RUNNING), lease_lost=True)[0] == 0


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 200))
def test_redundancy_grows_where_there_is_room_and_never_beyond_half(
    spares: int, more: int, shards: int
) -> None:
    now = LastTry(spares, more, "why").spares_now(shards)
    assert now <= max(1, shards // 2)
    if more and spares < max(1, shards // 2):
        assert now > spares


def test_the_sentence_gives_numbers_limit_and_reason() -> None:
    assert LastTry(1, 1, "why").sentence(8) == (
        "At least 2 redundant shard(s) after 1 in the try before: why"
    )
    assert "at least 2" in LastTry(1, 5, "why").sentence(4).lower()
    assert "no more than half" in LastTry(1, 5, "why").sentence(4)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def leave(folder: RunFolder, name: str, last: RunRecord | None, *, spares: int = 0, at: int = 0) -> Path:
    """Leave what a try leaves: a plan, and a record when it got as far as that."""
    plan = make_plan(folder.root, spares=spares, shards=4, attempt=f"attempts/{name}")
    plan.paths.create()
    plan.paths.plan.write_text(plan.model_dump_json())
    os.utime(plan.paths.plan, (at, at))
    if last is not None:
        write_record(plan.paths.run, last)
    return plan.run_dir


def test_the_newest_try_counts_whatever_it_is_called(folder: RunFolder) -> None:
    assert last_try(folder) is None
    leave(folder, "try-2", record(RunState.FAILED, failure()), spares=1, at=100)
    leave(folder, "try-1-2", record(RunState.STOPPED), spares=2, at=200)
    found = last_try(folder)
    assert found is not None and (found.spares, found.more) == (2, 0)


def test_a_try_that_was_killed_before_it_said_anything_counts_as_broken_off(folder: RunFolder) -> None:
    leave(folder, "try-1", None, spares=1)
    found = last_try(folder)
    assert found is not None and (found.spares, found.more) == (1, 1)


def test_a_try_that_lost_its_lease_leaves_word_of_that(folder: RunFolder) -> None:
    note_lost_lease(leave(folder, "try-1", record(RunState.RUNNING), spares=1), "preempted")
    found = last_try(folder)
    assert found is not None and (found.spares, found.more) == (1, 0)


def test_after_a_success_nothing_is_raised(folder: RunFolder) -> None:
    leave(folder, "try-1", record(RunState.SUCCEEDED, failure()), spares=1)
    assert last_try(folder) is None


def test_what_cannot_be_read_is_an_error_for_the_caller(folder: RunFolder) -> None:
    (leave(folder, "try-1", None) / "plan.json").write_text("{")
    with pytest.raises(ValueError, match="JSON"):
        last_try(folder)
