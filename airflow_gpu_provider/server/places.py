"""Where every waiting claim stands: as the leader worked it out, and further back as it would.

Each second the leader works out the next few hundred, whose turn matters to somebody; all of a long queue
would take its time from the turns. Those behind stand in the order of their ranks, are told the reason of one
ahead that asks for the same, and start at the pace of those ahead where that is known. The next step is
`views.queue`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from airflow_gpu_provider.broker.rank import Rank
from airflow_gpu_provider.server.board import Entry
from airflow_gpu_provider.wire import RequestBody

#: Claims whose place the leader works out each second.
WORKED_OUT = 200


@dataclass(frozen=True, slots=True)
class Place:
    """Where a claim stands; None = not known yet."""

    position: int | None
    expected_at: datetime | None
    reason_code: str | None
    reason: str | None


def places(
    waiting: Iterable[Entry], rank: Callable[[Entry], Rank], now: datetime, worked_out: int = WORKED_OUT
) -> list[tuple[Entry, Place]]:
    """Return the claims with their places, the next one first."""
    told: list[tuple[int, Entry]] = []
    untold: list[Entry] = []
    for entry in waiting:
        if entry.position is None:
            untold.append(entry)
        else:
            told.append((entry.position, entry))
    told.sort(key=lambda each: (each[0], each[1].submitted_at, each[1].claim_id))
    found = [(entry, _as_told(entry)) for _, entry in told]
    untold.sort(key=rank)
    if len(told) < worked_out:  # they have just come: the leader tells in a moment
        return found + [(entry, _as_told(entry)) for entry in untold]
    taken, reasons = {position for position, _ in told}, _reasons(entry for _, entry in told)
    position = 0
    for entry in untold:
        position = next(each for each in range(position + 1, len(taken) + position + 2) if each not in taken)
        code, text = reasons.get(entry.body.request, (None, None))
        found.append((entry, Place(position, None, code, text)))
    found.sort(key=lambda each: each[1].position or 0)
    return _paced(found, now)


def _as_told(entry: Entry) -> Place:
    return Place(entry.position, entry.expected_at, entry.reason_code, entry.reason)


def _reasons(told: Iterable[Entry]) -> dict[RequestBody, tuple[str | None, str | None]]:
    """Return why claims wait, by what they ask for; of several the last one's, which is nearest."""
    return {
        entry.body.request: (entry.reason_code, entry.reason) for entry in told if not entry.impossible_since
    }


def _paced(found: list[tuple[Entry, Place]], now: datetime) -> list[tuple[Entry, Place]]:
    """Let those start at the pace of those ahead who are behind the last one of whom a start is expected."""
    known = [place for _, place in found if place.expected_at is not None and place.position is not None]
    if not known or known[-1].position is None or known[-1].expected_at is None:
        return found
    last, each_s = known[-1].position, (known[-1].expected_at - now) / known[-1].position
    return [
        (entry, Place(place.position, now + each_s * place.position, place.reason_code, place.reason))
        if place.position is not None and place.position > last and not entry.impossible_since
        else (entry, place)
        for entry, place in found
    ]
