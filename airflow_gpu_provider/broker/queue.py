"""Who is next, and what a claim that cannot start keeps for itself.

Order: value, less a penalty for backfill runs, plus ageing; ties by time of submission, then id. A blocked
claim holds the free devices that it could use; a later one may take them only if it promises to end before
the blocked one is expected to start (EASY backfill). Claims for other devices pass freely. A claim that
waits for people (drained devices) holds nothing, or it would idle the rest. The next step is
`cycle.decide`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np

from airflow_gpu_provider.broker.capacity import Capacity, Part, Place, part_of
from airflow_gpu_provider.broker.diagnosis import Diagnosis, Suitable, diagnose
from airflow_gpu_provider.broker.forecast import NOTHING, Expected, Forecast
from airflow_gpu_provider.broker.layout import BoolArray
from airflow_gpu_provider.broker.model import (
    Claim,
    CyclePolicy,
    DeviceId,
    GpuRequest,
    Placement,
    RunType,
    Waiting,
)
from airflow_gpu_provider.broker.placement import Found, Placer

#: Claims for which a start is computed in a cycle; those further back show "unknown", and hold on to
#: their devices without one. Bounds the time of a cycle, not what is decided for the head.
_FORECAST_DEPTH = 100


def urgency(claim: Claim, now: datetime, policy: CyclePolicy) -> float:
    """Return the rank value of a claim: higher goes first."""
    waited_min = max(0.0, (now - claim.submitted_at).total_seconds() / 60)
    penalty = policy.backfill_penalty if claim.run_type is RunType.BACKFILL else 0.0
    return claim.value - penalty + policy.ageing_per_min * waited_min


def ordered(claims: Iterable[Claim], now: datetime, policy: CyclePolicy) -> list[Claim]:
    """Return the claims, the next one first."""
    return sorted(claims, key=lambda claim: (-urgency(claim, now, policy), claim.submitted_at, claim.id))


@dataclass(slots=True)
class _Hold:
    """Capacity kept for a blocked claim until it is expected to start; None = nobody may use it."""

    part: Part
    starts_in_s: float | None


@dataclass(frozen=True, slots=True)
class _Blocked:
    """What is known of a request class that could not start in this cycle."""

    diagnosis: Diagnosis
    devices: BoolArray
    is_forecast: bool  #: False = its start is unknown, and so is that of those behind it


@dataclass(slots=True)
class _Granted:
    claim: Claim
    found: Found
    spares: tuple[Place, ...] = ()


class Walk:
    """One walk along the queue: each claim is placed, or holds what it needs and waits.

    Capacity only shrinks during a walk, so once a request class is blocked, every later claim of it is: a
    thousand claims for a full flavor cost little more than one.
    """

    def __init__(
        self,
        capacity: Capacity,
        placer: Placer,
        policy: CyclePolicy,
        endings: Iterable[tuple[float, Part]],
    ) -> None:
        self._capacity = capacity
        #: the same without holds
        self._unheld = capacity.copy()
        self._placer = placer
        self._policy = policy
        self._endings = list(endings)
        self._forecast: Forecast | None = None
        self._forecasts = 0
        self._holds: list[_Hold] = []
        self._blocked: dict[tuple[GpuRequest, frozenset[DeviceId]], _Blocked] = {}
        self._granted: list[_Granted] = []
        self._waiting: list[Waiting] = []
        #: [B, W] devices that some waiting claim could use once leases end
        self._wanted: BoolArray = np.zeros_like(capacity.open)

    def run(self, queue: Sequence[Claim]) -> tuple[tuple[Placement, ...], tuple[Waiting, ...]]:
        """Return the placements and where the others stand."""
        for claim in queue:
            self._visit(claim)
        for granted in self._granted:
            granted.spares = self._idle_spares(granted)
        return tuple(self._placement(granted) for granted in self._granted), tuple(self._waiting)

    def _visit(self, claim: Claim) -> None:
        # Spares are no part of whether a claim can start.
        key = (replace(claim.request, spares=0), claim.excluded)
        blocked = self._blocked.get(key)
        if blocked is None:
            found = self._place(claim)
            if found is not None:
                self._granted.append(_Granted(claim, found))
                return
            blocked, expected = self._block(claim)
            self._blocked[key] = blocked
        else:
            expected = self._expect(claim.request, blocked.devices) if blocked.is_forecast else NOTHING
        position = len(self._waiting) + 1
        self._waiting.append(Waiting(claim.id, position, blocked.diagnosis.reason, expected.starts_in_s))

    # -- placing
    def _place(self, claim: Claim) -> Found | None:
        request = claim.request
        passable = [hold for hold in self._holds if _ends_before(request, hold)]
        for hold in passable:
            self._capacity.give(hold.part)
        found = self._placer.place(request, claim.excluded)
        if found is not None:
            part = part_of(self._capacity.layout, request, found.places)
            self._capacity.take(part)
            self._unheld.take(part)
            if self._forecast is not None:
                self._forecast.book(part, request.max_runtime_s)
            elif request.max_runtime_s is not None:
                self._endings.append((request.max_runtime_s, part))
        for hold in passable:
            hold.part = self._capacity.hide(hold.part)
        return found

    # -- blocked claims
    def _block(self, claim: Claim) -> tuple[_Blocked, Expected]:
        request = claim.request
        suitable = Suitable(self._placer.suitable(request), self._placer.suitable(request, claim.excluded))
        diagnosis = diagnose(
            request, suitable, visible=self._capacity, unheld=self._unheld, max_load=self._policy.max_load
        )
        expected = NOTHING
        if diagnosis.starts_by_waiting:
            self._wanted |= suitable.allowed
            expected = self._expect(request, suitable.allowed)
            kept = self._capacity.hide(expected.keep)
            if kept.devices or kept.nodes:
                self._holds.append(_Hold(kept, expected.starts_in_s))
        return _Blocked(diagnosis, suitable.allowed, expected.starts_in_s is not None), expected

    def _expect(self, request: GpuRequest, devices: BoolArray) -> Expected:
        if self._forecast is None:
            idle = Capacity.idle(self._capacity.layout, max_load=self._policy.max_load)
            self._forecast = Forecast(self._capacity, idle, self._endings)
        self._forecasts += 1
        if self._forecasts > _FORECAST_DEPTH:
            return self._forecast.expect_unknown(request, devices)
        return self._forecast.expect(request, devices)

    # -- spares
    def _idle_spares(self, granted: _Granted) -> tuple[Place, ...]:
        """Return devices of the gang's kinds that no waiting claim could use, the gang's own host first."""
        request, layout = granted.claim.request, self._capacity.layout
        spares: list[Place] = []
        members = np.array([bank for bank, _ in granted.found.places], np.int64)
        alike = np.isin(layout.kind_of, layout.kind_of[members])
        suitable = self._placer.suitable(request, granted.claim.excluded) & alike[:, None] & ~self._wanted
        for place in granted.found.places:
            suitable[place] = False
        host_of_bank = layout.host_of[layout.node_of]
        is_far = ~np.isin(host_of_bank, host_of_bank[members])
        while len(spares) < request.spares:
            room = self._capacity.host_limit(request)[layout.node_of] > 0
            bank, slot = np.nonzero(self._capacity.free(request, suitable & room[:, None]))
            if not len(bank):
                break
            best = int(np.lexsort((slot, bank, is_far[bank]))[0])
            place = (int(bank[best]), int(slot[best]))
            self._capacity.take(part_of(layout, request, [place]))
            # A shared device may have room for one more: it must not serve one gang twice.
            suitable[place] = False
            spares.append(place)
        return tuple(spares)

    def _placement(self, granted: _Granted) -> Placement:
        device = self._capacity.layout.device
        return Placement(
            granted.claim.id,
            tuple(device(bank, slot).id for bank, slot in granted.found.places),
            tuple(device(bank, slot).id for bank, slot in granted.spares),
            granted.found.match_degree,
        )


def _ends_before(request: GpuRequest, hold: _Hold) -> bool:
    if request.max_runtime_s is None or hold.starts_in_s is None:
        return False
    return request.max_runtime_s <= hold.starts_in_s
