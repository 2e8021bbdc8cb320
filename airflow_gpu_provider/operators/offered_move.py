"""A move that the broker offers to the work on a lease: to devices that have what it asked for.

`with offer:` accepts it, lets the block move the state, and commits at its end; a block that raises stays
where it was. Until the commit the old devices are the work's own, and both places are while it moves. Offers
are made by `HeldLease.resize`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from types import TracebackType

from airflow_gpu_provider.exceptions import GpuProviderError
from airflow_gpu_provider.resizes import OfferView

log = logging.getLogger(__name__)


class OfferedMove:
    """Other devices for a lease, held for it until `expires_at`."""

    def __init__(
        self, view: OfferView, environment: dict[str, str], answer: Callable[[str], OfferView | None]
    ) -> None:
        #: all devices of the lease after the move, in the order of its members
        self.devices = tuple(view.devices)
        self.spares = tuple(view.spares)
        #: old and new device of each member that moves
        self.moves = tuple(view.moves)
        self.expires_at: datetime = view.expires_at
        self._environment = environment
        self._answer = answer

    def environment(self) -> dict[str, str]:
        """Return the environment for a process that works on the new devices only."""
        return dict(self._environment)

    def accept(self) -> None:
        """Take time to move: from now on both places may be used. Raise NotResized when it ran out."""
        accepted = self._answer("accept")
        if accepted is not None:
            self.expires_at = accepted.expires_at

    def commit(self) -> None:
        """Have the new devices and give the old ones back, which nothing may use any more.

        Raise NotResized when the offer ran out: the lease is where it was.
        """
        self._answer("commit")

    def decline(self) -> None:
        """Stay, and give the new devices back."""
        self._answer("decline")

    def __enter__(self) -> OfferedMove:
        """Accept."""
        self.accept()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Commit, or decline when the block raised."""
        if kind is None:
            self.commit()
            return
        try:
            self.decline()
        except GpuProviderError as declining:
            # The error of the block is the one to tell; the new devices are free when the offer runs out.
            log.warning("The move could not be declined: %s", declining)
