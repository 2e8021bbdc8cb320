"""Answers what the supervisor of a run asks of its lease: more memory, in place or by a move.

Called again and again by whoever holds the lease and watches the run. It keeps nothing but the open offer,
and would find that again by asking the broker for the same, so that another holder may go on. Asked by
`training.growth`; a move is committed only when the supervisor says that nothing runs in the old places.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from airflow_gpu_provider.exceptions import GpuProviderError, LeaseLost, NotResized
from airflow_gpu_provider.operators.fit_answers import FittingLease, fit, grown, leave
from airflow_gpu_provider.operators.offered_move import OfferedMove
from airflow_gpu_provider.training.growth_words import (
    Answer,
    GrowthFiles,
    Outcome,
    Question,
    Verb,
)
from airflow_gpu_provider.wire import PASSED_ON, DeviceView

log = logging.getLogger(__name__)


class GrowingLease(FittingLease, Protocol):
    """What is used of a `KeptLease`."""

    @property
    def spares(self) -> Sequence[DeviceView]:
        """Those beside them."""

    def resize(self, *, memory: str) -> OfferedMove | None:
        """Have so much memory on each device, at once or by the move that is returned. Raise NotResized."""


class GrowthAnswers:
    """The holder's side of the talk about one run's lease."""

    def __init__(self, lease: GrowingLease, run_dir: Path) -> None:
        self._lease = lease
        self._files = GrowthFiles(run_dir)
        self._offer: OfferedMove | None = None

    def look(self) -> None:
        """Answer the question that waits; without a broker it goes on waiting. Raise LeaseLost."""
        question = self._files.question()
        if question is None:
            return
        try:
            answer = self._answer(question)
        except LeaseLost as lost:
            if lost.reason != PASSED_ON:
                raise
            return  # a later try of the task has it, and brings the orders to go on with it
        except GpuProviderError as error:
            log.warning("The run asks for %s, and the broker does not answer: %s", question.verb.value, error)
            return
        level = logging.DEBUG if question.verb is Verb.FIT else logging.INFO  # asked every other second
        log.log(level, "The run asked for %s (%s): %s", question.verb.value, question.why, answer.sentence)
        try:
            self._files.answer(answer)
        except OSError as error:  # a full disk; the question waits, and may be answered again
            log.warning("The answer could not be written: %s", error)

    def _answer(self, question: Question) -> Answer:
        if question.verb is Verb.FIT:
            return fit(self._lease, question)
        if question.verb is Verb.LEAVE:
            return leave(self._lease, question)
        return self._resize(question) if question.verb is Verb.RESIZE else self._close(question)

    def _resize(self, question: Question) -> Answer:
        refusal = "nothing was asked for"
        for memory_mib in question.memory_mib:
            try:
                offer = self._lease.resize(memory=f"{memory_mib}MiB")
                if offer is not None:
                    offer.accept()
            except NotResized as refused:
                refusal = refused.message
                continue
            if offer is not None and not self._is_here(offer):
                offer.decline()
                refusal = "the devices that are free are on another host, where this run has no processes"
                continue
            self._offer = offer
            return self._granted(question, offer, memory_mib)
        return Answer(number=question.number, outcome=Outcome.REFUSED, sentence=refusal)

    def _is_here(self, offer: OfferedMove) -> bool:
        return {device.host for device in offer.devices} <= {device.host for device in self._lease.devices}

    def _granted(self, question: Question, offer: OfferedMove | None, memory_mib: int) -> Answer:
        if offer is None:
            return Answer(
                number=question.number,
                outcome=Outcome.IN_PLACE,
                sentence=f"{memory_mib} MiB on each device, in place",
                memory_mib=memory_mib,
                devices=grown((*self._lease.devices, *self._lease.spares)),
            )
        moves = ", ".join(f"from {old} to {new}" for old, new in offer.moves)
        return Answer(
            number=question.number,
            outcome=Outcome.MOVING,
            sentence=f"{memory_mib} MiB on each device, {moves}",
            memory_mib=memory_mib,
            devices=grown((*offer.devices, *offer.spares)),
            moves=offer.moves,
        )

    def _close(self, question: Question) -> Answer:
        """Commit or decline the move; repeated, it finds that done."""
        offer = self._offer or self._lease.resize(memory=f"{question.memory_mib[0]}MiB")
        self._offer = None
        done = Answer(number=question.number, outcome=Outcome.DONE, sentence="the old devices are given back")
        if offer is None:
            return done
        try:
            if question.verb is Verb.DECLINE or tuple(offer.moves) != question.moves:
                offer.decline()
                outcome = Outcome.DONE if question.verb is Verb.DECLINE else Outcome.REFUSED
                return done.model_copy(update={"outcome": outcome, "sentence": "the move is off"})
            offer.commit()
        except NotResized as refused:
            return done.model_copy(update={"outcome": Outcome.REFUSED, "sentence": refused.message})
        except GpuProviderError:
            self._offer = offer
            raise
        return done
