"""What becomes of a run's question while its lease changes hands or is taken back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_gpu_provider.exceptions import LeaseLost, NotResized
from airflow_gpu_provider.operators.growth_answers import GrowthAnswers
from airflow_gpu_provider.training.growth_words import GrowthFiles, Outcome, Question, Verb
from airflow_gpu_provider.wire import PASSED_ON


class Lease:
    """A lease whose every wish the broker refuses in the same way."""

    devices: Any = (SimpleNamespace(host="h"),)
    spares: Any = ()

    def __init__(self, refusal: Exception) -> None:
        self._refusal = refusal

    def fit(self, least: int, most: int) -> int:
        raise self._refusal

    def give_back(self, devices: Iterable[Any]) -> None:
        raise self._refusal

    def resize(self, *, memory: str) -> None:
        raise self._refusal


def asked(folder: Path, refusal: Exception) -> tuple[GrowthFiles, GrowthAnswers]:
    files = GrowthFiles(folder)
    files.ask(Question(number=1, verb=Verb.FIT, bounds=(2, 4)))
    return files, GrowthAnswers(Lease(refusal), folder)


def test_a_question_waits_while_a_later_try_takes_the_lease_over(tmp_path: Path) -> None:
    files, answers = asked(tmp_path, LeaseLost("a later try has it", reason=PASSED_ON))
    answers.look()
    assert files.question() is not None, "it is answered in the new epoch"


def test_a_lease_that_is_lost_ends_the_talk(tmp_path: Path) -> None:
    _, answers = asked(tmp_path, LeaseLost("it expired"))
    with pytest.raises(LeaseLost, match="expired"):
        answers.look()


def test_a_lease_that_is_being_taken_back_stays_as_it_is(tmp_path: Path) -> None:
    files, answers = asked(tmp_path, NotResized("it is taken back", reason="taken_back"))
    answers.look()
    assert files.question() is None
    answer = files.answer_to(1)
    assert answer is not None and answer.outcome is Outcome.REFUSED
