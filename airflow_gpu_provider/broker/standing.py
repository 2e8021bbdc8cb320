"""Tell those who wait where they stand: position, reason, expected start.

Worked out when somebody asks, never in a turn. The claims are what a turn left, so none of them can start
now; the reason is that of the first claim of a class. Starts are computed in the order of the queue, each
claim booking what it will take, so that the next one cannot count on the same devices.
"""

from __future__ import annotations

from collections.abc import Iterable

from airflow_gpu_provider.broker.capacity import Capacity, Part
from airflow_gpu_provider.broker.diagnosis import Outlook, Suitable, diagnose
from airflow_gpu_provider.broker.forecast import NOTHING, Expected, Forecast
from airflow_gpu_provider.broker.model import Claim, Reason, Waiting
from airflow_gpu_provider.broker.placement import Placer
from airflow_gpu_provider.broker.queue import ClassKey, Holds, class_of

#: Claims for which a start is computed; those further back show "unknown".
_FORECAST_DEPTH = 100


def standings(
    claims: Iterable[Claim],
    capacity: Capacity,
    placer: Placer,
    outlook: Outlook,
    endings: list[tuple[float, Part]],
) -> tuple[Waiting, ...]:
    """Return where the claims stand, which are in the order of the queue; ``capacity`` is left as it is."""
    return _Report(capacity, placer, outlook, endings).of(claims)


class _Report:
    def __init__(
        self, capacity: Capacity, placer: Placer, outlook: Outlook, endings: list[tuple[float, Part]]
    ) -> None:
        self._visible = capacity.copy()
        self._unheld = capacity
        self._placer = placer
        self._outlook = outlook
        self._holds = Holds(self._visible, placer, outlook, lambda: endings)
        self._forecast = Forecast(self._visible, outlook.idle, endings)
        self._forecasts = 0
        self._reasons: dict[ClassKey, Reason] = {}
        self._unknown: set[ClassKey] = set()  # nothing promises their start, nor that of those behind

    def of(self, claims: Iterable[Claim]) -> tuple[Waiting, ...]:
        told = []
        for position, claim in enumerate(claims, start=1):
            key = class_of(claim)
            reason = self._reasons.get(key)
            if reason is None:
                reason = self._reasons[key] = self._diagnose(key)
                self._holds.block(key)
            told.append(Waiting(claim.id, position, reason, self._expect(key).starts_in_s))
        return tuple(told)

    def _diagnose(self, key: ClassKey) -> Reason:
        request, excluded = key
        suitable = Suitable(self._placer.groups(request), self._placer.groups(request, excluded))
        return diagnose(request, suitable, visible=self._visible, unheld=self._unheld, outlook=self._outlook)

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
