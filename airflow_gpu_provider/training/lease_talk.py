"""The supervisor's side of the talk with whoever holds the lease: one question at a time.

A wish that nobody answers is refused after a while; a move that was begun has to be closed, however long the
answer takes. A question that closes a move is remembered with the new placement before it is put, so that a
supervisor's successor neither starts in an old place nor leaves the move open: one that was not closed yet it
declines, since what ran in the new places ended with its supervisor. Used by `growth` and `refit`.
"""

from __future__ import annotations

import logging

from airflow_gpu_provider.training.growth_words import (
    Answer,
    GrowthFiles,
    Outcome,
    Placement,
    Question,
    Verb,
)
from airflow_gpu_provider.training.plan import RunPlan, Slot

log = logging.getLogger(__name__)

_ANSWER_WITHIN_S = 30.0


class LeaseTalk:
    """Questions and answers of one run."""

    def __init__(self, plan: RunPlan) -> None:
        self._files = GrowthFiles(plan.run_dir)
        self._number = self._files.last_number()
        self._shards = plan.shard_count
        self._deadline: float | None = None  #: None = from the next look on
        self.asked: Question | None = None  #: what is not answered yet
        self.placed: tuple[Slot, ...] | None = None  #: where an earlier supervisor has left the processes
        self.open_move: Answer | None = None  #: what an earlier supervisor had begun
        self._take_up()

    def ask(self, wish: Question, now: float, *, slots: tuple[Slot, ...] | None = None) -> None:
        """Put a question; with ``slots`` it closes a move to these."""
        self._number += 1
        question = wish.model_copy(update={"number": self._number})
        if slots is not None:
            self.remember(slots, closing=question)
        log.log(_level(wish), "Asking the holder of the lease: %s %s", wish.verb.value, wish.why)
        self._files.ask(question)
        self.asked, self._deadline = question, now + _ANSWER_WITHIN_S

    def hear(self, now: float) -> Answer | None:
        """Return the answer once there is one; the question is over then."""
        assert self.asked is not None
        answer = self._files.answer_to(self.asked.number)
        if answer is None:
            self._deadline = self._deadline or now + _ANSWER_WITHIN_S
            if not self.asked.verb.is_wish or now < self._deadline:
                return None
            sentence = f"nobody who holds the lease answered within {_ANSWER_WITHIN_S:g} s"
            answer = Answer(number=self.asked.number, outcome=Outcome.REFUSED, sentence=sentence)
        log.log(_level(self.asked), "The holder of the lease: %s: %s", answer.outcome.value, answer.sentence)
        self.asked = None
        return answer

    def remember(self, slots: tuple[Slot, ...], *, closing: Question | None = None) -> None:
        """Note where the processes are from now on."""
        members, spares = slots[: self._shards], slots[self._shards :]
        self._files.place(Placement(members=members, spares=spares, closing=closing))

    def _take_up(self) -> None:
        """Go on with what an earlier supervisor has left open."""
        placement, last = self._files.placement(), self._files.last()
        closing = None
        if placement is not None:
            self.placed, closing = (*placement.members, *placement.spares), placement.closing
        if closing is not None and (last is None or last.number <= closing.number):
            self.asked, self._number = closing, closing.number
            if self._files.answer_to(self._number) is None:
                self._files.ask(closing)
        elif last is not None and last.verb is Verb.RESIZE:
            answer = self._files.answer_to(last.number)
            self.asked = last if answer is None else None
            self.open_move = answer if answer is not None and answer.outcome is Outcome.MOVING else None


def _level(question: Question) -> int:
    """Return how loud to be: a question that is asked every other second is not for people."""
    return logging.DEBUG if question.verb is Verb.FIT else logging.INFO
