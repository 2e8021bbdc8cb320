"""What the broker's tables hold, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select

from airflow_gpu_provider.store.repository import Repository
from airflow_gpu_provider.store.tables import lease_device


def pending(repository: Repository) -> list[Any]:
    """Return the rows of all pending claims, next first."""
    return [row for row, held in repository.open_claims() if held is None]


def claims(repository: Repository, claim_ids: Sequence[str]) -> list[Any]:
    """Return the rows of these claims, unknown ones left out."""
    return [row for row, _ in repository.claims_and_leases(claim_ids)]


def counts(repository: Repository) -> tuple[int, int, int]:
    """Return the numbers of pending claims, live leases and devices that are leased or held for a move."""
    devices = select(func.count(lease_device.c.device_id.distinct())).where(lease_device.c.ended_at.is_(None))
    with repository._engine.connect() as connection:
        number = connection.execute(devices).scalar_one()
    return len(pending(repository)), len(repository.live_leases()), number
