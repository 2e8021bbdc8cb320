"""One walk along the queue: who starts, and what a claim that cannot start keeps for itself.

Claims come in their `order`. The first blocked of those who compete for the same devices holds what it needs
of them; a later one may take that only if it promises to end before the first is expected to start (EASY
backfill). Claims for other devices pass freely. A claim that waits for people (drained devices) or for its
own team (its limit) holds nothing, or it would idle the rest. The next step is `cycle.decide` or
`engine.Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from airflow_gpu_provider.broker.capacity import Capacity, Part, Place, part_of
from airflow_gpu_provider.broker.classes import ClassKey
from airflow_gpu_provider.broker.diagnosis import Outlook
from airflow_gpu_provider.broker.fair_share import FairShare
from airflow_gpu_provider.broker.forecast import Expected, Forecast
from airflow_gpu_provider.broker.layout import BoolArray
from airflow_gpu_provider.broker.model import Claim, DeviceId, GpuRequest, Placement
from airflow_gpu_provider.broker.placement import Found, Placer
from airflow_gpu_provider.broker.taking_back import TakingBack

#: Classes of which a start is computed in one walk; those further back hold on to their devices without
#: one. Bounds the time of a walk, not what is decided for the head.
_FORECAST_DEPTH = 100


@dataclass(slots=True)
class _Hold:
    """Capacity kept for a blocked claim until it is expected to start; None = nobody may use it."""

    part: Part
    starts_in_s: float | None


@dataclass(slots=True)
class _Granted:
    claim: Claim
    key: ClassKey  #: excludes all that it may not be given
    found: Found
    spares: tuple[Place, ...] = ()


class Holds:
    """What blocked claims keep of a capacity, the first in the order first; `let_go` gives all of it back."""

    def __init__(
        self,
        capacity: Capacity,
        placer: Placer,
        outlook: Outlook,
        endings: Callable[[], Iterable[tuple[float, Part]]],
    ) -> None:
        self._capacity = capacity
        self._placer = placer
        self._outlook = outlook
        self._endings = endings
        self._begun: list[tuple[Part, float | None]] = []
        self._forecast: Forecast | None = None
        self._forecasts = 0
        self._holds: list[_Hold] = []
        #: [B, W] devices for which somebody who holds some of them waits
        self._awaited: BoolArray = np.zeros_like(capacity.open)

    def block(self, key: ClassKey) -> None:
        """Keep what a claim of this class needs, unless one before it already keeps of what it could use.

        So of those who compete only the first keeps devices idle; it is served before the next one is first.
        """
        if self._has_nothing_to_hold(key):
            return
        devices = self._placer.suitable(key.request, key.excluded)
        if not (devices & self._awaited).any() and self._keep(key):
            self._awaited |= devices

    def keep(self, key: ClassKey) -> None:
        """Keep what a claim of this class needs, whoever else does."""
        if not self._has_nothing_to_hold(key):
            self._keep(key)

    def _keep(self, key: ClassKey) -> bool:
        groups = self._placer.groups(key.request, key.excluded)
        if not self._outlook.starts_by_waiting(key, key.request, groups):
            return False
        expected = self._expect(key.request, groups)
        kept = self._capacity.hide(expected.keep)
        if not (kept.devices or kept.nodes):
            return False
        self._holds.append(_Hold(kept, expected.starts_in_s))
        return True

    def passing(self, request: GpuRequest) -> list[_Hold]:
        """Open the holds that a request need not respect; close them again with `close`."""
        if request.max_runtime_s is None:
            return []
        passable = [hold for hold in self._holds if _ends_before(request.max_runtime_s, hold)]
        for hold in passable:
            self._capacity.give(hold.part)
        return passable

    def close(self, opened: Iterable[_Hold]) -> None:
        """Keep again what is left of these holds."""
        for hold in opened:
            hold.part = self._capacity.hide(hold.part)

    def begin(self, part: Part, max_runtime_s: float | None) -> None:
        """Count on a claim that starts now: it takes a part, and ends when it promised."""
        if self._forecast is not None:
            self._forecast.book(part, max_runtime_s)
        else:
            self._begun.append((part, max_runtime_s))

    def wants(self, key: ClassKey) -> BoolArray:
        """Return the devices that a claim of this class could use once leases end."""
        devices = self._placer.suitable(key.request, key.excluded)
        groups = self._placer.groups(key.request, key.excluded)
        waits = self._outlook.starts_by_waiting(key, key.request, groups)
        return devices if waits else np.zeros_like(devices)

    def let_go(self) -> None:
        """Give all holds back."""
        for hold in self._holds:
            self._capacity.give(hold.part)
        self._holds.clear()
        self._awaited[:] = False

    def _has_nothing_to_hold(self, key: ClassKey) -> bool:
        """Tell whether nothing at all is free that the class could use: then there is nothing to keep.

        On a node with several kinds its cores may be free though its devices are not, and may be needed.
        """
        capacity, request = self._capacity, key.request
        if any(capacity.free_of_kind[kind] for kind in self._placer.kinds(request, key.excluded)):
            return False
        return capacity.layout.is_one_kind_a_node or not (request.cpu_cores or request.host_memory_mib)

    def _expect(self, request: GpuRequest, groups: Sequence[BoolArray]) -> Expected:
        if self._forecast is None:
            begun = [(seconds, part) for part, seconds in self._begun if seconds is not None]
            self._forecast = Forecast(self._capacity, self._outlook.idle, [*self._endings(), *begun])
        self._forecasts += 1
        if self._forecasts > _FORECAST_DEPTH:
            return self._forecast.expect_unknown(request, groups)
        return self._forecast.expect(request, groups)


def _ends_before(max_runtime_s: float, hold: _Hold) -> bool:
    return hold.starts_in_s is not None and max_runtime_s <= hold.starts_in_s


def nobody(claim: Claim, key: ClassKey) -> bool:
    """Take no lease back."""
    return False


class Walk:
    """One walk along the queue: each claim is placed, or holds what it needs and waits.

    Capacity only shrinks during a walk and teams only get more, so once a class is blocked, every later claim
    of it is: only the first one of a class is looked at, and only that one holds something.
    """

    def __init__(
        self,
        capacity: Capacity,
        placer: Placer,
        holds: Holds,
        share: FairShare,
        back: TakingBack,
        take_back: Callable[[Claim, ClassKey], bool] = nobody,
    ) -> None:
        self._capacity = capacity
        self._back = back
        self._take_back = take_back  #: told who is blocked; returns whether leases are taken back for it
        self._placer = placer
        self._holds = holds
        self._share = share
        self._blocked: dict[ClassKey, None] = {}
        self._granted: list[_Granted] = []
        self._left_over: list[Part] = []

    def visit(self, claim: Claim, key: ClassKey) -> bool:
        """Place the claim, whose devices are taken then, or block its class; return whether it was placed.

        The key may exclude more than the claim does: what is reserved for others.
        """
        if key in self._blocked or self._share.is_over_limit(claim):
            return False
        found = self._place(key)
        if found is None:
            self._blocked[key] = None
            if self._take_back(claim, key) or key.alone is not None:
                self._holds.keep(key)
            else:
                self._holds.block(key)
            return False
        self._assume(claim, found.places)
        self._granted.append(_Granted(claim, key, found))
        return True

    def end(self) -> list[tuple[Placement, Part]]:
        """Give spares to the placed, and the holds back; return the placements and what each takes."""
        wanted = self._wanted() if any(each.claim.request.spares for each in self._granted) else None
        for granted in self._granted:
            if wanted is not None and granted.claim.request.spares:
                granted.spares = self._idle_spares(granted, wanted)
        self._holds.let_go()
        for part in self._left_over:
            self._capacity.give(part)
        self._share.assume_nothing()
        return [self._placement(granted) for granted in self._granted]

    def _place(self, key: ClassKey) -> Found | None:
        kept = self._back.kept_for(key.alone)
        for part in kept:
            self._capacity.give(part)
        found = self._take(key.request, key.excluded)
        for part in kept:
            if found is None:
                self._capacity.take(part)
            else:  # free for others, but not before the end: capacity only shrinks
                self._left_over.append(self._capacity.hide(part))
        return found

    def _take(self, request: GpuRequest, excluded: frozenset[DeviceId]) -> Found | None:
        opened = self._holds.passing(request)
        found = self._placer.place(request, excluded)
        if found is not None:
            part = part_of(self._capacity.layout, request, found.places)
            self._capacity.take(part)
            self._holds.begin(part, request.max_runtime_s)
        self._holds.close(opened)
        return found

    def _assume(self, claim: Claim, places: Iterable[Place]) -> None:
        layout = self._capacity.layout
        self._share.assume(claim, (layout.device(bank, slot).id for bank, slot in places))

    # -- spares
    def _wanted(self) -> BoolArray:
        """Return the devices that some waiting claim could use once leases end."""
        wanted: BoolArray = np.zeros_like(self._capacity.open)
        for key in self._blocked:
            wanted |= self._holds.wants(key)
        return wanted

    def _idle_spares(self, granted: _Granted, wanted: BoolArray) -> tuple[Place, ...]:
        """Return devices of the gang's kinds that no waiting claim could use, the gang's own host first."""
        request, layout = granted.key.request, self._capacity.layout
        wanted_spares = min(granted.claim.request.spares, self._share.room(granted.claim))
        spares: list[Place] = []
        members = np.array([bank for bank, _ in granted.found.places], np.int64)
        alike = np.isin(layout.kind_of, layout.kind_of[members])
        suitable = self._placer.suitable(request, granted.key.excluded) & alike[:, None] & ~wanted
        for place in granted.found.places:
            suitable[place] = False
        host_of_bank = layout.host_of[layout.node_of]
        is_far = ~np.isin(host_of_bank, host_of_bank[members])
        while len(spares) < wanted_spares:
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
        self._assume(granted.claim, spares)
        return tuple(spares)

    def _placement(self, granted: _Granted) -> tuple[Placement, Part]:
        layout, request, found = self._capacity.layout, granted.key.request, granted.found
        part = part_of(layout, request, (*found.places, *granted.spares))
        placement = Placement(
            granted.claim.id,
            tuple(layout.device(bank, slot).id for bank, slot in found.places),
            tuple(layout.device(bank, slot).id for bank, slot in granted.spares),
            found.match_degree,
            tuple(milli for _, _, milli in part.devices) if request.is_shared else (),
        )
        if granted.spares:  # taken one by one, each rounded up: a lease takes them together
            for places in (found.places, *([spare] for spare in granted.spares)):
                self._capacity.give(part_of(layout, request, places))
            self._capacity.take(part)
        return placement, part
