"""What goes wrong on purpose: answers of the API server that a client must survive."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tests.kubernetes.errors import ApiError


@dataclass(slots=True)
class Refusal:
    """Requests that fail: those whose ``METHOD path?query`` matches, so many times."""

    pattern: str
    code: int
    reason: str
    times: int
    retry_after_s: int | None = None


@dataclass(slots=True)
class Faults:
    """The faults of one server, changed while it runs."""

    refusals: list[Refusal] = field(default_factory=list)
    watch_delay_s: float = 0.0
    answer_delay_s: float = 0.0
    drops: int = 0  #: each step up ends all open watches in the middle of a line

    def refuse(
        self, pattern: str, code: int, reason: str, *, times: int = 1, retry_after_s: int | None = None
    ) -> None:
        """Let the next requests that match a pattern fail."""
        self.refusals.append(Refusal(pattern, code, reason, times, retry_after_s))

    def check(self, request: str) -> None:
        """Raise what a request is to be answered with, if anything."""
        for refusal in self.refusals:
            if refusal.times and re.search(refusal.pattern, request):
                refusal.times -= 1
                message = f"{refusal.reason}: a fault of the imitation"
                raise ApiError(refusal.code, refusal.reason, message, retry_after_s=refusal.retry_after_s)
