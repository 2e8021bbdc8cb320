"""What travels between the broker and the holder of a lease that becomes more, less, or moves.

Pydantic models only, like `wire`. A wish names what the lease should be, not by how much it should change, so
that a call that got no answer can be repeated.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field, model_validator

from airflow_gpu_provider.broker.model import DeviceId
from airflow_gpu_provider.broker.move import OfferPhase
from airflow_gpu_provider.broker.resize import Wish
from airflow_gpu_provider.wire import MOST_GPUS, MOST_MIB, DeviceView, LeaseBody, LeaseView, Name, RequestBody


class ResizeBody(LeaseBody):
    """Ask for more or less: so much memory on each device, or so many members."""

    memory_mib: int | None = Field(None, ge=1, le=MOST_MIB)
    gpus: int | None = Field(None, ge=1, le=MOST_GPUS)
    #: with `gpus`: the devices that are given back; the last ones where none is named
    leave: tuple[Name, ...] = Field((), max_length=MOST_GPUS)

    #: with `gpus`: as many as are idle, at most those, and to hear how many beyond the least others wait for
    least: int | None = Field(None, ge=1, le=MOST_GPUS)

    @model_validator(mode="after")
    def _bounds(self) -> ResizeBody:
        if self.least is not None and (self.gpus is None or self.least > self.gpus or self.leave):
            raise ValueError("least goes with gpus, is at most as large, and nothing leaves with it")
        return self

    @model_validator(mode="after")
    def _one_thing(self) -> ResizeBody:
        if (self.memory_mib is None) == (self.gpus is None):
            raise ValueError("ask for memory_mib or for gpus, one of them at a time")
        return self

    def to_wish(self) -> Wish:
        """Return the core's value."""
        return Wish(self.memory_mib, self.gpus, tuple(map(DeviceId, self.leave)), self.least)


class MoveBody(LeaseBody):
    """Accept, commit or decline the move that was offered."""

    offer_id: Name


class OfferView(BaseModel):
    """A move as the holder sees it: its lease after it, and who goes where."""

    offer_id: str
    phase: OfferPhase
    devices: list[DeviceView]
    spares: list[DeviceView] = []
    moves: list[tuple[str, str]]  #: old and new device of each member that moves
    expires_at: datetime
    expires_in_s: float


class ResizeAnswer(BaseModel):
    """The lease as it is now, and the move that is offered where it cannot change in place."""

    lease: LeaseView
    offer: OfferView | None = None
    request: RequestBody | None = None  #: what the lease is now; a later try asks for the same
    wanted_back: int = 0  #: asked with `least`: so many of the last devices would let others start
