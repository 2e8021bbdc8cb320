"""Tell those who wait where they stand: position, reason, expected start.

Worked out when somebody asks, never in a turn. The claims are what a turn left, so none of them can start
now; the reason is that of the first claim of a class, as the next turn would find it. Starts are computed in
the order of the queue, each claim booking what it will take, so that the next one cannot count on the same
devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from airflow_gpu_provider.broker.artifact_affinity import absent_reason
from airflow_gpu_provider.broker.capacity import Capacity, Part
from airflow_gpu_provider.broker.classes import Classing, ClassKey
from airflow_gpu_provider.broker.diagnosis import Outlook, Suitable, diagnose
from airflow_gpu_provider.broker.fair_share import FairShare
from airflow_gpu_provider.broker.forecast import NOTHING, Expected, Forecast
from airflow_gpu_provider.broker.keeping import Keeping
from airflow_gpu_provider.broker.model import Claim, Reason, ReasonCode, Waiting
from airflow_gpu_provider.broker.placement import Placer
from airflow_gpu_provider.broker.queue import Holds
from airflow_gpu_provider.broker.strictness import judged_by, told
from airflow_gpu_provider.broker.taking_back import TakingBack

#: Claims for which a start is computed; those further back show "unknown".
_FORECAST_DEPTH = 100


#: Standings that are this old may be told again.
_STANDING_S = 1.0


class Told:
    """The last whole report, told again for a moment while nothing happened to devices."""

    def __init__(self) -> None:
        self._at: datetime | None = None
        self._version = -1
        self._found: tuple[Waiting, ...] = ()

    def note(self, now: datetime, version: int, found: tuple[Waiting, ...]) -> None:
        """Keep a report of this version of the floor."""
        self._at, self._version, self._found = now, version, found

    def again(self, now: datetime, version: int) -> tuple[Waiting, ...] | None:
        """Return the last report while it is true; None = work it out."""
        if self._at is None or version != self._version:
            return None
        return self._found if abs((now - self._at).total_seconds()) < _STANDING_S else None


@dataclass(frozen=True, slots=True)
class World:
    """What claims are judged by; a report leaves all of it as it is."""

    capacity: Capacity
    placer: Placer
    outlook: Outlook
    share: FairShare
    classing: Classing
    keeping: Keeping
    back: TakingBack
    now: datetime


def standings(
    claims: Iterable[Claim], heads: Iterable[Claim], world: World, endings: list[tuple[float, Part]]
) -> tuple[Waiting, ...]:
    """Return where the claims stand, which are in the order of the queue.

    ``heads`` are the first ones of their classes, in the order in which the next turn looks at them.
    """
    return _Report(world, endings).of(claims, heads)


class _Report:
    def __init__(self, world: World, endings: list[tuple[float, Part]]) -> None:
        self._world = world
        self._visible = world.capacity.copy()
        self._unheld = world.capacity
        self._placer = world.placer
        self._outlook = world.outlook
        self._holds = Holds(self._visible, self._placer, self._outlook, lambda: endings)
        self._forecast = Forecast(self._visible, self._outlook.idle, endings)
        self._forecasts = 0
        #: by both keys of a class
        self._reasons: dict[tuple[ClassKey, ClassKey], Reason] = {}
        self._unknown: set[ClassKey] = set()  # nothing promises their start, nor that of those behind

    def of(self, claims: Iterable[Claim], heads: Iterable[Claim]) -> tuple[Waiting, ...]:
        keys = [(claim, *self._keys(claim)) for claim in claims]
        missing = {(own, key) for _, own, key in keys}
        for claim in heads:
            if not missing:
                break
            own, key = self._keys(claim)
            if (own, key) not in self._reasons:
                self._reasons[own, key] = self._reason(claim, own, key)
            missing.discard((own, key))
        return tuple(
            Waiting(claim.id, position, self._reasons[own, key], self._starts_in_s(claim, own, key))
            for position, (claim, own, key) in enumerate(keys, start=1)
        )

    def _reason(self, claim: Claim, own: ClassKey, key: ClassKey) -> Reason:
        """Return why a class waits, and hold what it holds."""
        reason = self._world.share.limit_reason(claim)
        if reason is not None:
            self._unknown.add(key)  # it waits for its team, whatever devices become free
            return reason
        if key.alone is not None:
            self._holds.keep(key)
            return self._world.back.reason(claim)
        reason = told(self._diagnose(claim, own, key), claim, own, self._placer)
        self._holds.block(key)
        return reason

    def _starts_in_s(self, claim: Claim, own: ClassKey, key: ClassKey) -> float | None:
        if key.alone is not None and key not in self._unknown:
            self._expect(key)  # books its devices
            return self._world.back.starts_in_s(key.alone, self._world.now)
        seconds = self._expect(key).starts_in_s
        if seconds is None and self._reasons[own, key].code is ReasonCode.RESERVED:
            return self._after(claim, own)
        return seconds

    def _keys(self, claim: Claim) -> tuple[ClassKey, ClassKey]:
        """Return the class by what a claim excludes itself, and by all that it may not be given now."""
        own = self._world.back.key_for(claim, judged_by(self._world.classing.key(claim), self._placer))
        return own, self._world.keeping.key_for(claim, own, self._world.now)

    def _diagnose(self, claim: Claim, own: ClassKey, key: ClassKey) -> Reason:
        groups, world = self._placer.groups, self._world
        if own.request.artifacts_required and not self._placer.fits_empty(own.request, own.excluded):
            suitable = int(self._placer.suitable(own.request, own.excluded).sum())
            absent = absent_reason(own.request, self._unheld.layout.nodes, suitable)
            if absent is not None:
                return absent
        return diagnose(
            own.request,
            Suitable(
                groups(own.request), groups(own.request, own.excluded), groups(key.request, key.excluded)
            ),
            visible=self._visible,
            unheld=self._unheld,
            outlook=self._outlook,
            rivals=world.keeping.in_the_way(claim, world.now) if key != own else "",
        )

    def _after(self, claim: Claim, own: ClassKey) -> float | None:
        """Return when enough reservations are over that what is free now would do."""
        keeping, now = self._world.keeping, self._world.now
        closed = keeping.closed_to(claim, now)
        for seconds, opened in keeping.reopenings(claim, now):
            closed -= opened
            groups = self._placer.groups(own.request, own.excluded | closed)
            if self._unheld.fits_one_of(own.request, groups):
                return seconds
        return None

    def _expect(self, key: ClassKey) -> Expected:
        if key in self._unknown:
            return NOTHING
        request, groups = key.request, self._placer.groups(key.request, key.excluded)
        self._forecasts += 1
        if self._forecasts > _FORECAST_DEPTH or not self._outlook.starts_by_waiting(key, request, groups):
            self._unknown.add(key)
            return NOTHING
        expected = self._forecast.expect(request, groups)
        if expected.starts_in_s is None:
            self._unknown.add(key)
        return expected
