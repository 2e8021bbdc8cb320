"""Which devices are kept now: chosen anew only when something that matters for it has happened.

A turn asks each time and pays a comparison of times while there is nothing to choose. What `renew` returns
is where claims may start that could not before, or hold what they no longer may. The choice is the one of
`reservation.keep`, which looks at all devices and leases: what people reserve and devices that fail are seen
at once, leases that come and go at most once a second. A lease of whole devices that neither sits on a kept
one nor is an owner's changes it only while too few good devices are kept. The next step is the turn of
`engine.Engine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from airflow_gpu_provider.broker.classes import ClassKey
from airflow_gpu_provider.broker.model import Claim, DeviceId, Fleet, Lease, LeaseId
from airflow_gpu_provider.broker.reservation import (
    NOTICE,
    Kept,
    Reservation,
    closed_to,
    in_the_way,
    is_settled,
    keep,
    overstayers,
    reopenings,
)

_NOTHING: frozenset[DeviceId] = frozenset()
_NOBODYS: frozenset[str] = frozenset()
#: Claims that promise to end may use a device up to the very moment that leaves them their time.
_INSTANT = timedelta(microseconds=1)
#: Leases come and go many times a second in a large fleet, and a start is far ahead of most of them.
_LEASES_EVERY = timedelta(seconds=1)


class Keeping:
    """The reservations of the fleet and the devices that are kept for them."""

    def __init__(
        self,
        notice: timedelta = NOTICE,
        reservations: Iterable[Reservation] = (),
        before: Mapping[str, frozenset[DeviceId]] | None = None,
    ) -> None:
        self._notice = notice
        self.reservations = tuple(reservations)
        self.kept: tuple[Kept, ...] = ()
        self._before = dict(before or {})
        self._must_choose = bool(self.reservations)
        #: a lease came or went that may change the choice
        self._may_choose = False
        self._chosen_at: datetime | None = None
        self._is_settled = True
        self._moves_at: datetime | None = None  #: when time alone closes or opens devices next

    def reserve(
        self,
        reservations: Iterable[Reservation],
        before: Mapping[str, frozenset[DeviceId]] | None = None,
    ) -> None:
        """Take these reservations instead of those of before; ``before`` names what was kept elsewhere."""
        self.reservations = tuple(reservations)
        self._before |= before or {}
        self._must_choose = True

    def see_fleet(self) -> None:
        """Note that the fleet has other devices, or that some failed or came back."""
        self._must_choose = bool(self.reservations or self.kept)

    def see_lease(self, lease: Lease) -> None:
        """Note that a lease began, ended or broke its promise."""
        if self._must_choose or self._may_choose or not self.kept:
            return
        self._may_choose = any(
            each.reservation.number
            and (
                not self._is_settled
                or each.reservation.is_for(lease.claim)
                or lease.request.is_shared  # an owner may be on the same device
                or not each.devices.isdisjoint(lease.devices)
            )
            for each in self.kept
        )

    def expect(self, runtime_s: float | None, now: datetime) -> None:
        """Note that a claim with this promise waits: it is kept off some day, which may let others pass."""
        if runtime_s is None:
            return
        for each in self.kept:
            closes_at = each.reservation.starts_at - timedelta(seconds=runtime_s) + _INSTANT
            if closes_at > now and (self._moves_at is None or closes_at < self._moves_at):
                self._moves_at = closes_at

    def is_due(self, now: datetime) -> bool:
        """Return whether `renew` may have something to do."""
        if self._must_choose or (self._moves_at is not None and now >= self._moves_at):
            return True
        if not self._may_choose:
            return False
        # abs: a clock that was set back must not keep the choice from being made
        return self._chosen_at is None or abs(now - self._chosen_at) >= _LEASES_EVERY

    def renew(
        self, now: datetime, fleet: Fleet, leases: Iterable[Lease], runtimes: Iterable[float | None]
    ) -> frozenset[DeviceId]:
        """Choose anew; return the devices of which it may have changed to whom they are closed.

        ``runtimes`` are the promises of the claims that wait.
        """
        is_moved = self._moves_at is not None and now >= self._moves_at
        old, leases = self.kept, list(leases)
        before = self._before | {each.reservation.id: each.devices for each in old}
        self.kept = keep(self.reservations, fleet, leases, now, before)
        self._before.clear()
        self._is_settled = is_settled(self.kept, fleet, leases, now)
        self._must_choose = self._may_choose = False
        self._chosen_at = now
        self._plan(now, runtimes)
        if old == self.kept and not is_moved:
            return _NOTHING
        return _NOTHING.union(*(each.devices for each in (*old, *self.kept)))

    def closed_to(self, claim: Claim | None, now: datetime) -> frozenset[DeviceId]:
        """Return the devices that a claim may not be given now."""
        return closed_to(claim, self.kept, now, self._notice) if self.kept else _NOTHING

    def key_for(self, claim: Claim, key: ClassKey, now: datetime) -> ClassKey:
        """Return the class of a claim at this moment: what is closed to it is excluded."""
        if not self.kept:
            return key
        closed = self.closed_to(claim, now)
        return key._replace(excluded=key.excluded | closed) if closed else key

    def in_the_way(self, claim: Claim, now: datetime) -> str:
        """Return for whom devices are closed to a claim, and until when."""
        return in_the_way(claim, self.kept, self.closed_to(claim, now), now)

    def reopenings(self, claim: Claim, now: datetime) -> list[tuple[float, frozenset[DeviceId]]]:
        """Return in how many seconds which devices will no longer be closed to a claim."""
        return reopenings(claim, self.kept, now, self._notice)

    def owned_by(self, claim: Claim) -> frozenset[str]:
        """Return the reservations that are for a claim; they are part of what makes claims alike."""
        if not self.reservations:
            return _NOBODYS
        return frozenset(each.id for each in self.reservations if each.is_for(claim))

    def overstayers(self, leases: Iterable[Lease], now: datetime) -> frozenset[LeaseId]:
        """Return the leases of others on devices whose reservation has started."""
        return overstayers(self.kept, leases, now)

    def _plan(self, now: datetime, runtimes: Iterable[float | None]) -> None:
        moments = [
            moment
            for each in self.kept
            for moment in (
                each.reservation.starts_at - self._notice,
                each.reservation.starts_at,
                each.reservation.ends_at,
            )
            if moment > now
        ]
        self._moves_at = min(moments, default=None)
        for runtime_s in set(runtimes):
            self.expect(runtime_s, now)
