"""What people tell the broker: take devices out of service, or keep them for somebody.

Only admins may (`server.people_api`). The rows that people look at are in `rows`.
"""

from __future__ import annotations

import uuid
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, Field

from airflow_gpu_provider.wire import MOST_GPUS, Body, Name, no_nul


class DrainBody(Body):
    """Take a node or a device out of service; leases that hold it go on."""

    target: Name = Field(min_length=1)
    reason: Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(no_nul)]
    for_s: float | None = Field(None, gt=0, le=366 * 86_400)


class ReservationBody(Body):
    """Reserve devices ahead for a team or a DAG: named ones, or a number of a model.

    The same ``id`` is the same reservation, so that the call can be repeated.
    """

    id: str = Field(default_factory=lambda: uuid.uuid4().hex[:8], pattern=r"^[A-Za-z0-9_.-]{1,36}$")
    starts_at: AwareDatetime
    for_s: float = Field(gt=0, le=366 * 86_400)
    team: Name | None = None
    dag_id: Name | None = None
    devices: tuple[Name, ...] = Field((), max_length=MOST_GPUS)
    number: int = Field(0, ge=0, le=MOST_GPUS)
    model: Name | None = None
    reason: Annotated[str, Field(max_length=1000), AfterValidator(no_nul)] = ""


class UnreserveBody(Body):
    """Take a reservation back."""

    id: Name = Field(min_length=1)


class UndrainBody(Body):
    """Put a node or device back into service."""

    target: Name = Field(min_length=1)
