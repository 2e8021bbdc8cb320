"""A migrated database of each kind, and short ways to ask and grant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from sqlalchemy import Engine

from airflow_gpu_provider.broker.model import ClaimId, Decisions, DeviceId, Placement
from airflow_gpu_provider.store.db_manager import migrate
from airflow_gpu_provider.store.decisions import DecisionStore
from airflow_gpu_provider.store.engine import make_engine
from airflow_gpu_provider.store.leadership import Leadership, Term
from airflow_gpu_provider.store.repository import Repository
from airflow_gpu_provider.wire import ClaimBody, RequestBody, TaskKey

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of a migrated database, once for each kind."""
    url = f"sqlite:///{tmp_path}/gpu.db"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres_url")
    migrate(url)
    return url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = make_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def repository(engine: Engine) -> Repository:
    return Repository(engine)


@pytest.fixture
def decisions(engine: Engine) -> DecisionStore:
    return DecisionStore(engine)


@pytest.fixture
def term(engine: Engine) -> Term:
    term = Leadership(engine, "test", ttl_s=600).acquire()
    assert term is not None
    return term


def body(task: str = "train", *, try_number: int = 1, gpus: int = 1, value: float = 0.0) -> ClaimBody:
    """Return a claim for the wire."""
    key = TaskKey(dag_id="d", run_id="r", task_id=task, map_index=-1, try_number=try_number)
    return ClaimBody(key=key, request=RequestBody(gpus=gpus), value=value, ti_id="ti")


@pytest.fixture
def grant(decisions: DecisionStore, term: Term) -> Callable[..., None]:
    """Return ``grant(claim_id, *devices)``: what a cycle of the leader writes."""

    def write(claim_id: str, *devices: str, spares: tuple[str, ...] = ()) -> None:
        placement = Placement(
            ClaimId(claim_id), tuple(map(DeviceId, devices)), tuple(map(DeviceId, spares)), match_degree=0.5
        )
        decisions.write(
            term,
            Decisions(placements=(placement,)),
            now=NOW,
            collect_within_s=120,
            node_of={DeviceId(d): "n1" for d in (*devices, *spares)},
        )

    return write
