"""What people took out of service, as this replica knows it, and the words that change it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta

from airflow_gpu_provider.broker.drain import Drain, DrainScope, with_drains
from airflow_gpu_provider.broker.model import Fleet
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.server.fleet import FleetMirror
from airflow_gpu_provider.store.drains import DrainStore
from airflow_gpu_provider.wishes import DrainBody

_NAMES = 6


class Drains:
    """The drains of the fleet, read anew when they change here and once a second."""

    def __init__(
        self,
        store: DrainStore,
        mirror: FleetMirror,
        clock: Callable[[], datetime],
        wake: Callable[[], None],
    ) -> None:
        self._store = store
        self._mirror = mirror
        self._clock = clock
        self._wake = wake
        self._known: tuple[Drain, ...] = ()
        self._in_force: tuple[Drain, ...] = ()
        self._refreshing = threading.Lock()
        #: grows whenever another set of drains is in force
        self.version = 0

    def refresh(self) -> None:
        """Read what other replicas were told, and see which drains are over."""
        with self._refreshing:
            self._known = self._store.load()
            now = self._clock()
            in_force = tuple(d for d in self._known if d.until is None or now < d.until)
            if in_force != self._in_force:
                self._in_force = in_force
                self.version += 1

    def in_force(self) -> tuple[Drain, ...]:
        """Return the drains that hold now."""
        return self._in_force

    def apply(self, fleet: Fleet, now: datetime) -> Fleet:
        """Return the fleet with what is drained unavailable."""
        return with_drains(fleet, self._in_force, now)

    def drain(self, body: DrainBody, by: str) -> Drain:
        """Take a node or device out of service. Raise InvalidRequest when nobody reports it."""
        now = self._clock()
        until = None if body.for_s is None else now + timedelta(seconds=body.for_s)
        wish = Drain(self._scope_of(body.target), body.target, body.reason, by, now, until)
        self._store.put(wish)
        self._changed()
        return wish

    def undrain(self, target: str) -> bool:
        """Put a node or device back into service; return False when it was not drained."""
        removed = [self._store.remove(scope, target) for scope in DrainScope]
        self._changed()
        return any(removed)

    def _changed(self) -> None:
        self.refresh()
        self._wake()

    def _scope_of(self, target: str) -> DrainScope:
        nodes = [stored.report.name for stored in self._mirror.stored()]
        if target in nodes:
            return DrainScope.NODE
        if self._mirror.device(target) is not None:
            return DrainScope.DEVICE
        listed = ", ".join(nodes[:_NAMES]) + (
            f" and {len(nodes) - _NAMES} more" if len(nodes) > _NAMES else ""
        )
        raise InvalidRequest(
            f"No agent reports a node or device {target!r}; nodes are {listed or 'none'}, devices are named "
            "by UUID (`airflow gpu nodes` lists both).",
            reason="unknown_target",
        )
