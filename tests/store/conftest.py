"""A migrated database of each kind, and short ways to ask and grant."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import Engine

from airflow_gpu_provider.store.engine import make_engine
from airflow_gpu_provider.store.leadership import Leadership, Term
from airflow_gpu_provider.store.repository import Repository
from airflow_gpu_provider.store.turns import Grant, Turn, TurnStore
from airflow_gpu_provider.wire import ClaimBody, RequestBody, TaskKey

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path, migrated_database: Path) -> str:
    """Return the address of a migrated database, once for each kind."""
    if request.param == "postgresql":
        url: str = request.getfixturevalue("migrated_postgres_url")
        return url
    return f"sqlite:///{shutil.copy(migrated_database, tmp_path / 'gpu.db')}"


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = make_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def repository(engine: Engine) -> Repository:
    return Repository(engine)


@pytest.fixture
def turns(engine: Engine) -> Iterator[TurnStore]:
    turns = TurnStore(engine)
    yield turns
    turns.close()


@pytest.fixture
def term(engine: Engine) -> Term:
    term = Leadership(engine, "test", ttl_s=600).acquire()
    assert term is not None
    return term


def body(task: str = "train", *, try_number: int = 1, gpus: int = 1, value: float = 0.0) -> ClaimBody:
    """Return a claim for the wire."""
    key = TaskKey(dag_id="d", run_id="r", task_id=task, map_index=-1, try_number=try_number)
    return ClaimBody(key=key, request=RequestBody(gpus=gpus), value=value, ti_id="ti")


def lease_id_of(claim_id: str) -> str:
    return f"lease-{claim_id[:20]}"


def granting(claim_id: str, *devices: str, spares: tuple[str, ...] = (), milli: int = 1000) -> Grant:
    """Return a grant as the leader's desk makes it."""
    lease_id = lease_id_of(claim_id)
    rows = tuple(
        {
            "lease_id": lease_id,
            "device_id": d,
            "node": "n1",
            "rank": rank,
            "is_spare": is_spare,
            "milli": milli,
            "ended_at": None,
        }
        for is_spare, named in ((0, devices), (1, spares))
        for rank, d in enumerate(named)
    )
    return Grant(lease_id, claim_id, 0.5, NOW + timedelta(seconds=120), None, rows)


@pytest.fixture
def grant(turns: TurnStore, term: Term) -> Callable[..., None]:
    """Return ``grant(claim_id, *devices)``: what a turn of the leader writes."""

    def write(claim_id: str, *devices: str, spares: tuple[str, ...] = (), milli: int = 1000) -> None:
        turns.write(term, Turn(NOW, grants=[granting(claim_id, *devices, spares=spares, milli=milli)]))

    return write
