"""What people reserved ahead, as this replica knows it, and the words that change it.

The leader's engine chooses which devices are kept. Other replicas read the choice from the tables and would
choose the same: `keep` leaves what was chosen as long as it is as good as anything else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta, timezone

from airflow_gpu_provider.broker.model import Claim, DeviceId, Fleet, Lease
from airflow_gpu_provider.broker.reservation import Kept, Reservation, closed_to, conflict, keep
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.store.reservations import ReservationStore
from airflow_gpu_provider.wishes import ReservationBody

_CLOCK = "%Y-%m-%d %H:%M UTC"
_FARTHEST = timedelta(days=366)


class Reservations:
    """The reservations of the fleet, read anew when they change here and once a second."""

    def __init__(
        self,
        store: ReservationStore,
        fleet: Callable[[datetime], Fleet],
        leases: Callable[[], Iterable[Lease]],
        *,
        notice: timedelta,
        clock: Callable[[], datetime],
        wake: Callable[[], None],
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._leases = leases
        self._notice = notice
        self._clock = clock
        self._wake = wake
        self._stored: tuple[Kept, ...] = ()
        self._refreshing = threading.Lock()
        #: grows whenever other reservations are known
        self.version = 0

    def refresh(self) -> None:
        """Read what other replicas were told."""
        with self._refreshing:  # the version last: who sees it grow finds what it stands for
            stored, before = self._store.load(), self._stored
            self._stored = stored
            if [each.reservation for each in stored] != [each.reservation for each in before]:
                self.version += 1

    def not_over(self) -> tuple[Reservation, ...]:
        """Return those that are not over."""
        now = self._clock()
        return tuple(each.reservation for each in self._stored if each.reservation.ends_at > now)

    def chosen(self) -> Mapping[str, frozenset[DeviceId]]:
        """Return which devices the leader kept at last, by reservation."""
        return {each.reservation.id: each.devices for each in self._stored}

    def kept(self) -> tuple[Kept, ...]:
        """Return which devices are kept now, as the leader chose; where it did not yet, as it would."""
        now = self._clock()
        open_ones = tuple(each for each in self._stored if each.reservation.ends_at > now)
        if all(each.devices for each in open_ones):
            return open_ones  # `keep` looks at every device and lease, and this is asked with each retry
        return keep(self.not_over(), self._fleet(now), self._leases(), now, self.chosen())

    def closed_to(self, claim: Claim) -> frozenset[DeviceId]:
        """Return the devices that a claim may not be given now."""
        return closed_to(claim, self.kept(), self._clock(), self._notice)

    def reserve(self, body: ReservationBody, by: str) -> Reservation:
        """Reserve devices. Raise InvalidRequest when they cannot be kept beside what is reserved already."""
        now = self._clock()
        if body.starts_at > now + _FARTHEST:
            raise InvalidRequest(
                f"The reservation would start at {body.starts_at.isoformat()}: give a start within a year.",
                reason="too_far_ahead",
            )
        starts_at = body.starts_at.astimezone(timezone.utc)
        wish = Reservation(
            id=body.id,
            starts_at=starts_at,
            ends_at=starts_at + timedelta(seconds=body.for_s),
            by=by,
            team=body.team,
            dag_id=body.dag_id,
            devices=frozenset(map(DeviceId, body.devices)),
            number=body.number,
            model=body.model,
            reason=body.reason,
        )

        def check(others: tuple[Reservation, ...]) -> None:
            if wish.ends_at <= now:
                raise InvalidRequest(
                    f"The reservation would end at {wish.ends_at:{_CLOCK}}, which is past (now is "
                    f"{now:{_CLOCK}}): give a later start or a longer time.",
                    reason="in_the_past",
                )
            open_ones = [each for each in others if each.ends_at > now]
            why_not = conflict(wish, open_ones, self._fleet(now))
            if why_not is not None:
                raise InvalidRequest(f"The reservation cannot be kept: {why_not}.", reason="conflict")

        stored = self._store.add(wish, check)
        self._changed()
        return stored

    def unreserve(self, reservation_id: str) -> bool:
        """Take a reservation back; return False when there is none."""
        removed = self._store.remove(reservation_id)
        self._changed()
        return removed

    def note(self, kept: Iterable[Kept]) -> None:
        """Store what the leader keeps, where that changed."""
        chosen = self.chosen()
        changed = [each for each in kept if chosen.get(each.reservation.id) != each.devices]
        if changed:
            self._store.note(changed)
            self.refresh()

    def forget_before(self, moment: datetime) -> None:
        """Delete what ended before."""
        self._store.forget_before(moment)

    def _changed(self) -> None:
        self.refresh()
        self._wake()
