"""What a supervisor asks of whoever holds the lease, and the answer: two files in the run's folder.

A supervisor has no access to the broker. It writes one question at a time, with a number; the holder answers
under the same number and keeps no state of its own, so that either side may be replaced in between. Asked by
`growth` and `refit`, answered in `operators.growth_answers`.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from airflow_gpu_provider.training.plan import Slot
from airflow_gpu_provider.training.run_file import write_json


class Verb(str, Enum):
    """What is asked of the lease."""

    RESIZE = "resize"
    """More memory on each device: in place, or a move to other devices, of which both places are ours."""
    COMMIT = "commit"
    """Nothing runs on the old places of the move any more: give them back."""
    DECLINE = "decline"
    """Nothing runs on the new places of the move: give them back and stay."""
    FIT = "fit"
    """As many devices as are idle, between two bounds; and how many of them others wait for."""
    LEAVE = "leave"
    """Nothing runs on these devices any more: give them back."""

    @property
    def is_wish(self) -> bool:
        """True for what is asked again later, so that its answer may be waited for in vain."""
        return self in (Verb.RESIZE, Verb.FIT)


class Outcome(str, Enum):
    """What became of it."""

    IN_PLACE = "in_place"
    """The devices are the same, with the memory that is told."""
    MOVING = "moving"
    """The new places are held beside the old ones until they are committed or declined."""
    DONE = "done"
    """Committed or declined."""
    REFUSED = "refused"
    """The lease stays as it was; the sentence says what would help."""


class _Word(BaseModel):
    model_config = ConfigDict(frozen=True)


_W = TypeVar("_W", bound=BaseModel)


class Question(_Word):
    """One question."""

    number: int = 0  #: given when it is put
    verb: Verb
    #: for each device, the most wanted first; with COMMIT and DECLINE: that of the move
    memory_mib: tuple[int, ...] = ()
    moves: tuple[tuple[str, str], ...] = ()  #: with COMMIT and DECLINE: old and new devices
    bounds: tuple[int, int] = (0, 0)  #: with FIT: the least and the most devices
    leave: tuple[str, ...] = ()  #: with LEAVE: the devices to give back
    why: str = ""


class GrownDevice(_Word):
    """A device of the lease as it is now, or as it would be after the move: a `LeasedDevice`."""

    id: str
    simulated: bool
    memory_mib: int
    milli: int

    @property
    def memory_limit_mib(self) -> int | None:
        """The memory that the work may use; None = all of it."""
        return None if self.milli == 1000 else self.memory_mib * self.milli // 1000


class Answer(_Word):
    """The answer to the question of that number."""

    number: int
    outcome: Outcome
    sentence: str
    memory_mib: int | None = None  #: what was granted of that which was wanted
    devices: tuple[GrownDevice, ...] = ()  #: of members and spares
    moves: tuple[tuple[str, str], ...] = ()  #: old and new device of each member that moves
    wanted_back: int = 0  #: so many of the last members would let others start, who wait


class Placement(_Word):
    """Where the run's processes are since its lease changed; a supervisor's successor begins there."""

    members: tuple[Slot, ...]  #: by logical rank
    spares: tuple[Slot, ...]
    closing: Question | None = None  #: asked last, and perhaps not answered


class GrowthFiles:
    """Where the words lie."""

    def __init__(self, run_dir: Path) -> None:
        self._question = run_dir / "lease_question.json"
        self._answer = run_dir / "lease_answer.json"
        self._placement = run_dir / "placement.json"

    def ask(self, question: Question) -> None:
        """Put a question; the one before it is over."""
        write_json(self._question, question.model_dump_json(indent=1))

    def last_number(self) -> int:
        """Return the number of the question that was put last, 0 while there is none."""
        asked = self.last()
        return 0 if asked is None else asked.number

    def last(self) -> Question | None:
        """Return the question that was put last."""
        return _read(self._question, Question)

    def question(self) -> Question | None:
        """Return the question that has no answer yet."""
        asked = self.last()
        return None if asked is None or self.answer_to(asked.number) is not None else asked

    def answer(self, answer: Answer) -> None:
        """Answer."""
        write_json(self._answer, answer.model_dump_json(indent=1))

    def answer_to(self, number: int) -> Answer | None:
        """Return the answer to a question, None while there is none."""
        found = _read(self._answer, Answer)
        return found if found is not None and found.number == number else None

    def place(self, placement: Placement) -> None:
        """Remember where the processes are from now on."""
        write_json(self._placement, placement.model_dump_json(indent=1))

    def placement(self) -> Placement | None:
        """Return where the processes are; None = where the plan has put them."""
        return _read(self._placement, Placement)


def _read(path: Path, kind: type[_W]) -> _W | None:
    try:
        return kind.model_validate_json(path.read_text())
    except FileNotFoundError:
        return None
