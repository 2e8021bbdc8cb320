"""What the holder of a lease tells of its work when it gives the lease back.

Kept by `held_lease.HeldLease` while the work goes on; travels in `wire.ReleaseBody`.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from pydantic import ValidationError

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.wire import LeaseView, ReleaseBody, wrong_fields

log = logging.getLogger(__name__)


class RunHistory:
    """Work done and shards lost so far."""

    def __init__(self) -> None:
        self.shards: int | None = None
        self.failed_on: tuple[str | None, ...] = ()
        self._units = 0.0
        self._seconds = 0.0
        self._since = time.monotonic()

    def begin(self) -> None:
        """Count the time of the work from now on."""
        self._since = time.monotonic()

    def add_work(self, units: float, seconds: float | None) -> None:
        """Add what was done; raise InvalidRequest for what cannot be an amount of work."""
        now = time.monotonic()
        took = now - self._since if seconds is None else seconds
        if not (0 <= units < math.inf and 0 <= took < math.inf):
            raise InvalidRequest(
                f"report_work({units!r}, seconds={seconds!r}): give how much was done and how long it took, "
                "neither below 0, e.g. report_work(products)."
            )
        self._units, self._seconds, self._since = self._units + units, self._seconds + took, now

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of a release that tell it; none where nothing is known."""
        fields: dict[str, Any] = {}
        if self._units > 0 and self._seconds > 0:
            fields = {"work": self._units, "work_s": self._seconds}
        if self.shards is not None:
            known = tuple(node for node in self.failed_on if node is not None)
            fields |= {"shards": self.shards, "failures": len(self.failed_on), "failed_on": known}
        return fields


def release_body(view: LeaseView, outcome: str, failed: tuple[str, ...], history: RunHistory) -> ReleaseBody:
    """Return what is said when a lease is given back."""
    fields: dict[str, Any] = {"secret": view.secret, "epoch": view.epoch, "outcome": outcome}
    try:
        return ReleaseBody(**fields, failed_devices=failed, **history.as_fields())
    except ValidationError as error:
        # The work is done, whatever is wrong with what it told of itself.
        log.warning("Lease %s tells nothing of its work: %s", view.lease_id, wrong_fields(error))
        return ReleaseBody(**fields)
