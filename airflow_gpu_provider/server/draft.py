"""A turn in the making: who asked what, what is to be written, and what to do once it is written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from airflow_gpu_provider.exceptions import BrokerUnavailable
from airflow_gpu_provider.server.board import Entry
from airflow_gpu_provider.server.outbox import Expected
from airflow_gpu_provider.server.requests import Request
from airflow_gpu_provider.store.turns import Turn


class NotLeading(BrokerUnavailable):
    """This replica does not decide any more: the request goes through the tables instead."""

    default_reason = "not_leading"


@dataclass(slots=True)
class Asked:
    """A request and where its answer goes."""

    request: Request
    answer: Future[Entry] | Expected
    attempts: int = 0
    until: float = math.inf  #: time.monotonic() after which who asked has gone on
    is_wanted: Callable[[], bool] | None = None  #: what another replica asked may be taken back

    def begin(self) -> bool:
        """Return whether someone still waits for the answer; from now on it cannot be called off."""
        if self.answer.done():
            return False
        return self.answer.running() or self.answer.set_running_or_notify_cancel()

    def check_wanted(self) -> None:
        """Raise BrokerUnavailable when who asked has gone on: nothing may change behind its back."""
        if time.monotonic() >= self.until or (self.is_wanted is not None and not self.is_wanted()):
            raise BrokerUnavailable("This was asked too long ago to be done now; ask again.")


@dataclass(slots=True)
class Draft:
    """A turn in the making: what to write, and what to do once it is written."""

    turn: Turn
    then: list[Callable[[], None]] = field(default_factory=list)
    touched: set[object] = field(default_factory=set)  #: claims and keys that this turn changes already
    new: dict[str, Entry] = field(default_factory=dict)

    def touches(self, *names: object) -> bool:
        """Note what a request changes; return whether this turn changes any of it already."""
        if any(name in self.touched for name in names):
            return True
        self.touched.update(names)
        return False


def fail(asked: Iterable[Asked], error: Exception) -> None:
    """Answer with an error those who have no answer yet."""
    for each in asked:
        if not each.answer.done():
            each.answer.set_exception(error)
