"""Tell those who wait where they stand: position, reason, expected start.

Worked out when somebody asks, never in a turn. The claims are what a turn left, so none of them can start
now; the reason is that of the first claim of a class. Starts are computed in the order of the queue, each
claim booking what it will take, so that the next one cannot count on the same devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from airflow_gpu_provider.broker.artifact_affinity import absent_reason
from airflow_gpu_provider.broker.capacity import Capacity, Part
from airflow_gpu_provider.broker.diagnosis import Outlook, Suitable, diagnose
from airflow_gpu_provider.broker.forecast import NOTHING, Expected, Forecast
from airflow_gpu_provider.broker.keeping import Keeping
from airflow_gpu_provider.broker.model import Claim, Reason, ReasonCode, Waiting
from airflow_gpu_provider.broker.placement import Placer
from airflow_gpu_provider.broker.queue import ClassKey, Holds, class_of

#: Claims for which a start is computed; those further back show "unknown".
_FORECAST_DEPTH = 100


@dataclass(frozen=True, slots=True)
class World:
    """What claims are judged by; a report leaves all of it as it is."""

    capacity: Capacity
    placer: Placer
    outlook: Outlook
    keeping: Keeping
    now: datetime


def standings(
    claims: Iterable[Claim], world: World, endings: list[tuple[float, Part]]
) -> tuple[Waiting, ...]:
    """Return where the claims stand, which are in the order of the queue."""
    return _Report(world, endings).of(claims)


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
        #: by what a claim excludes itself, and by all that it may not be given now
        self._reasons: dict[tuple[ClassKey, ClassKey], Reason] = {}
        self._unknown: set[ClassKey] = set()  # nothing promises their start, nor that of those behind

    def of(self, claims: Iterable[Claim]) -> tuple[Waiting, ...]:
        told = []
        for position, claim in enumerate(claims, start=1):
            own = class_of(claim)
            key = self._world.keeping.key_for(claim, own, self._world.now)
            reason = self._reasons.get((own, key))
            if reason is None:
                reason = self._reasons[own, key] = self._diagnose(claim, own, key)
                self._holds.block(key)
            starts_in_s = self._expect(key).starts_in_s
            if starts_in_s is None and reason.code is ReasonCode.RESERVED:
                starts_in_s = self._after(claim)
            told.append(Waiting(claim.id, position, reason, starts_in_s))
        return tuple(told)

    def _diagnose(self, claim: Claim, own: ClassKey, key: ClassKey) -> Reason:
        groups, world = self._placer.groups, self._world
        if own[0].artifacts_required and not self._placer.fits_empty(*own):
            suitable = int(self._placer.suitable(*own).sum())
            absent = absent_reason(own[0], self._unheld.layout.nodes, suitable)
            if absent is not None:
                return absent
        return diagnose(
            own[0],
            Suitable(groups(own[0]), groups(*own), groups(*key)),
            visible=self._visible,
            unheld=self._unheld,
            outlook=self._outlook,
            rivals=world.keeping.in_the_way(claim, world.now) if key != own else "",
        )

    def _after(self, claim: Claim) -> float | None:
        """Return when enough reservations are over that what is free now would do."""
        keeping, now = self._world.keeping, self._world.now
        request, excluded = class_of(claim)
        closed = keeping.closed_to(claim, now)
        for seconds, opened in keeping.reopenings(claim, now):
            closed -= opened
            if self._unheld.fits_one_of(request, self._placer.groups(request, excluded | closed)):
                return seconds
        return None

    def _expect(self, key: ClassKey) -> Expected:
        if key in self._unknown:
            return NOTHING
        request, groups = key[0], self._placer.groups(*key)
        self._forecasts += 1
        if self._forecasts > _FORECAST_DEPTH or not self._outlook.starts_by_waiting(key, request, groups):
            self._unknown.add(key)
            return NOTHING
        expected = self._forecast.expect(request, groups)
        if expected.starts_in_s is None:
            self._unknown.add(key)
        return expected
