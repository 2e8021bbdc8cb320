"""Where claims are let in or rejected, and where those wait that became impossible since.

What the whole fleet can never run is rejected at once. A claim that was let in and that the fleet cannot run
any more, since devices left, waits for them: agents start anew and machines reboot. It is told why, since
when and until when; it is rejected after `CyclePolicy.impossible_for`, and queued again as soon as the fleet
can run it. A fleet without any device is not known yet rather than too small. The next step of a claim that
is let in is the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime

from airflow_gpu_provider.broker.admission import Admission
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.model import (
    Claim,
    ClaimId,
    CyclePolicy,
    Reason,
    ReasonCode,
    Rejection,
    Waiting,
)

_CLOCK = "%Y-%m-%d %H:%M UTC"


class Intake:
    """Claims that are to be judged, and those that are impossible at present."""

    def __init__(self, policy: CyclePolicy) -> None:
        self._for = policy.impossible_for
        self._new: dict[ClaimId, Claim] = {}
        self._impossible: dict[ClaimId, tuple[Claim, Reason]] = {}
        self._next_over: datetime | None = None  #: when the first of them has waited long enough

    def __contains__(self, claim_id: ClaimId) -> bool:
        return claim_id in self._new or claim_id in self._impossible

    def __iter__(self) -> Iterator[Claim]:
        yield from self._new.values()
        yield from (claim for claim, _ in self._impossible.values())

    @property
    def has_new(self) -> bool:
        """Whether claims are to be judged."""
        return bool(self._new)

    def add(self, claim: Claim) -> None:
        """Let a claim be judged."""
        self._new[claim.id] = claim

    def again(self, claims: Iterable[Claim]) -> None:
        """Let claims be judged anew that were let in before, and all that are impossible at present."""
        waited = {claim.id: replace(claim, admitted=True) for claim in claims}
        stuck = {claim_id: claim for claim_id, (claim, _) in self._impossible.items()}
        self._new = waited | stuck | self._new
        self._impossible.clear()

    def remove(self, claim_id: ClaimId) -> None:
        """Forget a claim; unknown ones change nothing."""
        self._new.pop(claim_id, None)
        self._impossible.pop(claim_id, None)

    def is_due(self, now: datetime) -> bool:
        """Return whether `judge` has something to do."""
        return self.has_new or (self._next_over is not None and now >= self._next_over)

    def judge(
        self,
        admission: Admission,
        layout: Layout,
        now: datetime,
        never: Callable[[Claim], Reason | None],
        serves: Callable[[ClaimId], bool] = lambda _: False,
    ) -> tuple[list[Claim], list[Rejection]]:
        """Return the claims that are let in, and those that are rejected.

        ``never`` has the last word; those that hold devices already, by ``serves``, are forgotten.
        """
        for claim_id, (claim, _) in list(self._impossible.items()):
            if self._is_over(claim, now):
                del self._impossible[claim_id]
                self._new[claim_id] = claim
        admitted, rejections = [], []
        for submitted in self._new.values():
            if serves(submitted.id):
                continue
            claim, reason = admission.judge(submitted, layout)
            refusal = never(claim) if reason is None else self._refuse(claim, reason, now)
            if refusal is not None:
                rejections.append(Rejection(claim.id, refusal))
            elif reason is None:
                admitted.append(replace(claim, impossible_since=None) if claim.impossible_since else claim)
        self._new.clear()
        ends = (claim.impossible_since for claim, _ in self._impossible.values() if claim.impossible_since)
        first = min(ends, default=None)
        self._next_over = None if first is None else first + self._for
        return admitted, rejections

    def waiting(self, ahead: int) -> tuple[Waiting, ...]:
        """Return where the claims stand that are impossible at present, behind all others."""
        told = []
        ordered = sorted(self._impossible.values(), key=lambda each: (each[0].impossible_since, each[0].id))
        for position, (claim, reason) in enumerate(ordered, start=ahead + 1):
            assert claim.impossible_since is not None
            ends = claim.impossible_since + self._for
            text = f"{_since(claim, reason)}; rejected at {ends:{_CLOCK}} unless what is missing comes back"
            told.append(
                Waiting(
                    claim.id,
                    position,
                    Reason(ReasonCode.IMPOSSIBLE, text),
                    impossible_since=claim.impossible_since,
                )
            )
        return tuple(told)

    def _refuse(self, claim: Claim, reason: Reason, now: datetime) -> Reason | None:
        """Return why a claim is rejected that the fleet cannot run; None = it waits for the fleet."""
        if not claim.admitted and reason.code is not ReasonCode.NO_DEVICES:
            return reason
        claim = replace(claim, admitted=True, impossible_since=claim.impossible_since or now)
        if self._is_over(claim, now):
            return Reason(reason.code, _since(claim, reason))
        self._impossible[claim.id] = (claim, reason)
        return None

    def _is_over(self, claim: Claim, now: datetime) -> bool:
        return claim.impossible_since is not None and now >= claim.impossible_since + self._for


def _since(claim: Claim, reason: Reason) -> str:
    return f"{reason.text}; impossible since {claim.impossible_since:{_CLOCK}}"
