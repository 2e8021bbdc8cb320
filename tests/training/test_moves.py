"""Moves that do not come to pass: declined, committed too late, or begun by a supervisor that is gone.

The holder of the lease is this test: it answers in the run's folder, as an operator does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from airflow_gpu_provider.training.growth_words import Answer, GrownDevice, GrowthFiles, Outcome, Verb
from airflow_gpu_provider.training.plan import Slot
from airflow_gpu_provider.training.run_file import RunRecord, RunState
from tests.training.oracle import expected_weights
from tests.training.running import Running

MOVES = (("GPU-a", "GPU-c"), ("GPU-b", "GPU-d"))


def place(device: str) -> Slot:
    return Slot(device_ids=(device,), memory_mib=640)


class Holder:
    """Offers a move once, and closes it as it was told."""

    def __init__(self, run_dir: Path, *, on_commit: Outcome) -> None:
        self._files = GrowthFiles(run_dir)
        self._on_commit = on_commit
        self.asked: list[Verb] = []

    def look(self) -> None:
        question = self._files.question()
        if question is None:
            return
        self.asked.append(question.verb)
        answer = Answer(number=question.number, outcome=Outcome.DONE, sentence="closed")
        if question.verb is Verb.RESIZE:
            answer = answer.model_copy(update={"outcome": Outcome.REFUSED, "sentence": "not again"})
            if self.asked == [Verb.RESIZE]:
                moves = ", ".join(f"from {old} to {new}" for old, new in MOVES)
                devices = [
                    GrownDevice(id=new, simulated=True, memory_mib=2560, milli=1000) for _, new in MOVES
                ]
                answer = Answer(
                    number=question.number,
                    outcome=Outcome.MOVING,
                    sentence=moves,
                    memory_mib=1280,
                    devices=tuple(devices),
                    moves=MOVES,
                )
        elif question.verb is Verb.COMMIT:
            answer = answer.model_copy(update={"outcome": self._on_commit, "sentence": "it took too long"})
        self._files.answer(answer)


def trained(
    training: Callable[..., Running],
    then: Callable[[Running], Any] = lambda running: None,
    *,
    on_commit: Outcome = Outcome.DONE,
    **changes: Any,
) -> tuple[RunRecord, Holder, Running]:
    """Let a run ask for more memory; do ``then`` once processes are started in the new places."""
    running = training(
        member_slots=(place("GPU-a"), place("GPU-b")),
        spare_slots=(place("GPU-a"),),
        grow_at=0.9,
        **{"max_respawns": 2, "params": {"pause_s": 0.05, "take_memory_at": 12, "take_mib": 400}, **changes},
    )
    holder = Holder(running.plan.run_dir, on_commit=on_commit)
    acted = False

    def look(_: RunRecord) -> bool:
        nonlocal acted
        holder.look()
        if not acted and "u3" in running.pids():
            acted = True
            then(running)
        return running.run.has_ended()

    while not running.run.has_ended():
        record = running.run.record()
        if record is not None and look(record):
            break
    return running.end(), holder, running


def weights(record: RunRecord, running: Running) -> str:
    assert record.state is RunState.SUCCEEDED, (record.error, running.logs())
    assert record.checkpoint is not None
    return record.checkpoint.state_sha256


def notes(record: RunRecord) -> str:
    return " ".join(note.sentence for note in record.notes)


def test_a_move_whose_newcomer_is_lost_is_declined_and_training_goes_on_where_it_is(
    training: Callable[..., Running],
) -> None:
    record, holder, running = trained(training, lambda run: os.kill(run.pids()["u3"], signal.SIGKILL))
    assert weights(record, running) == expected_weights(10)
    assert holder.asked == [Verb.RESIZE, Verb.DECLINE]
    assert record.takeovers == [] and [failure.rank for failure in record.failures] == [None]
    assert "The move from GPU-a to GPU-c, from GPU-b to GPU-d is off" in notes(record)
    assert record.growths == []


def test_after_a_commit_that_came_too_late_the_run_goes_on_in_its_old_places(
    training: Callable[..., Running],
) -> None:
    record, holder, running = trained(training, on_commit=Outcome.REFUSED)
    assert weights(record, running) == expected_weights(10)
    assert holder.asked[:2] == [Verb.RESIZE, Verb.COMMIT]
    assert len(record.takeovers) == 2 and record.failures == []
    assert "is off: it took too long" in notes(record) and record.growths == []
    placed = GrowthFiles(running.plan.run_dir).placement()
    assert placed is not None and placed.members == (place("GPU-a"), place("GPU-b"))


def test_without_respawns_a_commit_that_came_too_late_ends_the_run_for_a_retry(
    training: Callable[..., Running],
) -> None:
    record, _, _ = trained(training, on_commit=Outcome.REFUSED, max_respawns=0)
    assert record.state is RunState.FAILED and record.supervisor_restarts == 0
    assert "with the places of a move" in str(record.error) and "retry resumes" in str(record.error)


def test_the_successor_of_a_supervisor_that_was_lost_in_a_move_declines_it(
    training: Callable[..., Running],
) -> None:
    record, holder, running = trained(training, lambda run: os.kill(run.supervisor(), signal.SIGKILL))
    assert weights(record, running) == expected_weights(10)
    assert record.supervisor_restarts == 1
    assert holder.asked[:2] == [Verb.RESIZE, Verb.DECLINE]
    assert record.growths == [] and "is off" in notes(record)
