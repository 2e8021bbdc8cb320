"""What people tell the broker: take devices out of service, or keep them for somebody.

Only admins may (`server.people_api`). The rows that people look at are in `rows`.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, Field, model_validator

from airflow_gpu_provider.wire import MOST_GPUS, Body, Name, no_nul


class DrainBody(Body):
    """Take a node or a device out of service; leases that hold it go on."""

    target: Name = Field(min_length=1)
    reason: Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(no_nul)]
    for_s: float | None = Field(None, gt=0, le=366 * 86_400)


def _filled(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty: write a name or leave it out")
    return text


def _of_our_days(moment: datetime) -> datetime:
    """Refuse times that no calendar can move to another zone."""
    if not 2000 <= moment.year < 9000:
        raise ValueError(f"is in the year {moment.year}: give a start from now to a year ahead")
    return moment


class ReservationBody(Body):
    """Reserve devices ahead for a team or a DAG: named ones, or a number of a model.

    The same ``id`` is the same reservation, so that the call can be repeated.
    """

    id: str = Field(default_factory=lambda: uuid.uuid4().hex[:8], pattern=r"^[A-Za-z0-9_.-]{1,36}$")
    starts_at: Annotated[AwareDatetime, AfterValidator(_of_our_days)]
    for_s: float = Field(gt=0, le=366 * 86_400)
    team: Annotated[Name, AfterValidator(_filled)] | None = None
    dag_id: Annotated[Name, AfterValidator(_filled)] | None = None
    devices: tuple[Name, ...] = Field((), max_length=MOST_GPUS)
    number: int = Field(0, ge=0, le=MOST_GPUS)
    model: Annotated[Name, AfterValidator(_filled)] | None = None
    reason: Annotated[str, Field(max_length=1000), AfterValidator(no_nul)] = ""

    @model_validator(mode="after")
    def _model_goes_with_a_number(self) -> ReservationBody:
        if self.devices and self.model is not None:
            raise ValueError("devices are named, and a model too: leave the model out, it goes with a number")
        return self


class UnreserveBody(Body):
    """Take a reservation back."""

    id: Name = Field(min_length=1)


class UndrainBody(Body):
    """Put a node or device back into service."""

    target: Name = Field(min_length=1)
