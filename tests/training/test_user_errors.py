"""Mistakes of authors, made in real processes: told at once, the first cause first, and no spare is burnt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_gpu_provider.training.failures import FailureCause
from airflow_gpu_provider.training.run_file import RunRecord, RunState
from tests.training.running import Running, is_alive

MISTAKES = "tests.training.mistakes:"


def the_error(record: RunRecord) -> str:
    """Return the error of a run that its author's mistake has ended, with its spare untouched."""
    assert record.state is RunState.FAILED and record.hopeless, record
    assert {failure.cause for failure in record.failures} == {FailureCause.USER_ERROR}
    assert record.takeovers == [] and record.processes_started == 3
    return str(record.error)


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        (
            "tests.training.mistaken:train",
            "No module named 'tests.training.mistaken'; the module must lie in",
        ),
        (
            "tests.training.imports_what_is_missing:train",
            "ModuleNotFoundError: No module named 'no_such_pack",
        ),
        (MISTAKES + "return_at_once", "returned without `for step in ctx.steps"),
        (MISTAKES + "exit_early", r"called sys.exit(0)"),
        (MISTAKES + "return_a_tensor", "returned Tensor that is not plain JSON"),
    ],
)
def test_what_the_author_did_wrong_is_named(
    training: Callable[..., Running], entrypoint: str, words: str
) -> None:
    assert words in the_error(training(spares=1, entrypoint=entrypoint).end())


@pytest.mark.parametrize("at", [0, 5])
def test_of_shards_that_all_raise_the_first_is_told_first(training: Callable[..., Running], at: int) -> None:
    running = training(spares=1, entrypoint=MISTAKES + "raise_everywhere", params={"at": at})
    record = running.end()
    assert "ValueError: shard 1 cannot go on" in the_error(record)
    assert (record.failures[0].rank, record.failures[0].step) == (1, at)
    assert running.plan.paths.log("u1").read_text().startswith("no newline at the end")


def test_a_shard_that_never_comes_to_its_loop_is_named_within_a_bound(
    training: Callable[..., Running],
) -> None:
    running = training(spares=1, entrypoint=MISTAKES + "never_join", join_timeout_s=3)
    record = running.end()
    assert record.state is RunState.SUCCEEDED, "the spare did come"
    assert [(failure.uid, failure.cause) for failure in record.failures] == [("u1", FailureCause.HUNG)]
    assert "did not reach ctx.steps() within 3 s" in record.failures[0].evidence


def test_what_a_shard_has_started_ends_with_it(training: Callable[..., Running], tmp_path: Path) -> None:
    note = tmp_path / "child"
    running = training(spares=1, entrypoint=MISTAKES + "leave_a_child", params={"note": str(note)})
    running.until(lambda record: len(record.takeovers) == 1, "the takeover")
    assert not is_alive(int(note.read_text())), "before another process has its place"
    assert running.end().state is RunState.SUCCEEDED
