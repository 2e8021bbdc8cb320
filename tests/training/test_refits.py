"""Devices come and go under a run while its processes are lost: the weights stay those of two shards.

The holder of the lease is this test: it answers in the run's folder, as a keeper does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest

from airflow_gpu_provider.training.elastic import assign_elastic
from airflow_gpu_provider.training.growth_words import (
    Answer,
    GrownDevice,
    GrowthFiles,
    Outcome,
    Question,
    Verb,
)
from airflow_gpu_provider.training.run_file import RunRecord, RunState
from airflow_gpu_provider.training.shard_range import ShardRange
from tests.training.oracle import expected_weights
from tests.training.running import Running

RANGE = ShardRange(1, 2)
STEPS = 200


def device(name: str) -> GrownDevice:
    return GrownDevice(id=name, simulated=True, memory_mib=640, milli=1000)


class Holder:
    """Has a second device that it lends and wants back in turns."""

    def __init__(self, run_dir: Path, is_idle: Iterator[bool]) -> None:
        self._files = GrowthFiles(run_dir)
        self._is_idle = is_idle
        self.held = ["GPU-a"]
        self.left: list[tuple[str, ...]] = []

    def look(self) -> None:
        question = self._files.question()
        if question is not None:
            self._files.answer(self._fit(question) if question.verb is Verb.FIT else self._leave(question))

    def _fit(self, question: Question) -> Answer:
        is_idle = next(self._is_idle)
        if is_idle and question.bounds[1] == 2 and len(self.held) == 1:
            self.held.append("GPU-b")
        return Answer(
            number=question.number,
            outcome=Outcome.IN_PLACE,
            sentence="so many",
            devices=tuple(map(device, self.held)),
            wanted_back=0 if is_idle else len(self.held) - 1,
        )

    def _leave(self, question: Question) -> Answer:
        assert question.verb is Verb.LEAVE
        self.left.append(question.leave)
        self.held = [name for name in self.held if name not in question.leave]
        return Answer(number=question.number, outcome=Outcome.DONE, sentence="given back")


Act = Callable[[Running], bool]


def trained(
    training: Callable[..., Running], act: Act, is_idle: Iterator[bool], tmp_path: Path, *, growths: int = 1
) -> tuple[RunRecord, Holder]:
    """Train while devices come and go, and hurry once ``act`` has done its part and so many changes are made.

    ``act`` is called until it says that it has.
    """
    slots, hurry = assign_elastic([device("GPU-a")], RANGE, spares=1), tmp_path / "hurry"
    running = training(
        member_slots=slots.members,
        spare_slots=slots.spares,
        least_devices=RANGE.least,
        max_respawns=4,
        params={
            "steps": STEPS,
            "pause_s": 0.15,
            "hurry_file": str(hurry),
            "late_file": str(tmp_path / "late"),
        },
    )
    holder = Holder(running.plan.run_dir, is_idle)
    has_acted = False
    while not running.run.has_ended():
        holder.look()
        record = running.run.record()
        has_acted = has_acted or (record is not None and act(running))
        if has_acted and record is not None and len(record.growths) >= growths:
            hurry.touch()
    record = running.end()
    assert has_acted, running.logs()
    assert record.state is RunState.SUCCEEDED, (record.error, running.logs())
    assert record.checkpoint is not None
    assert record.checkpoint.state_sha256 == expected_weights(10, STEPS)
    return record, holder


def kill_who_is_to_move(running: Running) -> bool:
    """The shard whose place the newcomer is to take, as that starts."""
    if "u3" not in running.pids():
        return False
    os.kill(running.pids()["u1"], signal.SIGKILL)
    return True


def kill_who_stays(running: Running) -> bool:
    if "u3" not in running.pids():
        return False
    os.kill(running.pids()["u0"], signal.SIGKILL)
    return True


def kill_supervisor(running: Running) -> bool:
    if "u3" not in running.pids():
        return False
    os.kill(running.supervisor(), signal.SIGKILL)
    return True


@pytest.mark.parametrize("hurt", [kill_who_is_to_move, pytest.param(kill_who_stays, marks=pytest.mark.slow)])
def test_a_shard_that_is_lost_while_devices_join_costs_nothing(
    training: Callable[..., Running], hurt: Act, tmp_path: Path
) -> None:
    record, holder = trained(training, hurt, repeat(True), tmp_path)
    assert len(record.failures) == 1 and holder.left == []
    assert "on 2 device(s)" in record.growths[0]


@pytest.mark.slow
def test_a_supervisor_that_is_lost_amid_a_change_is_replaced_and_the_change_made_again(
    training: Callable[..., Running], tmp_path: Path
) -> None:
    record, holder = trained(training, kill_supervisor, repeat(True), tmp_path)
    assert record.supervisor_restarts == 1 and holder.left == []
    assert "on 2 device(s)" in record.growths[0]


def test_a_shard_that_is_lost_while_devices_leave_costs_nothing_and_they_leave(
    training: Callable[..., Running], tmp_path: Path
) -> None:
    def act(running: Running) -> bool:
        """Kill the shard that stays, as the one beside it comes."""
        record = running.run.record()
        assert record is not None
        if not record.growths or "u4" not in running.pids():
            return False
        running.hurt(0, signal.SIGKILL)
        return True

    record, holder = trained(training, act, chain([True], repeat(False)), tmp_path, growths=2)
    assert holder.left == [("GPU-b",)] and holder.held == ["GPU-a"]
    assert "on 1 device(s)" in record.growths[1] and len(record.failures) == 1


def test_devices_that_others_want_go_back_before_the_newcomers_on_them_are_ready(
    training: Callable[..., Running], tmp_path: Path
) -> None:
    late = tmp_path / "late"

    def act(running: Running) -> bool:
        record = running.run.record()
        assert record is not None
        if record.step >= 10 and not late.exists():
            late.touch()  # who is started from now on does not get ready
        return "The devices stay as they were" in " ".join(note.sentence for note in record.notes)

    lent_once = chain(iter(late.exists, True), [True], repeat(False))
    record, holder = trained(training, act, lent_once, tmp_path, growths=0)
    assert holder.left == [("GPU-b",)] and record.growths == [] and record.failures == []
