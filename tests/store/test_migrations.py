from __future__ import annotations

from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, insert, inspect, select, text
from sqlalchemy.exc import IntegrityError

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.store import tables
from airflow_gpu_provider.store.db_manager import GpuDBManager, alembic_config, current_revision, migrate
from airflow_gpu_provider.store.engine import make_engine
from airflow_gpu_provider.store.rows import new_claim_row
from airflow_gpu_provider.store.tables import VERSION_TABLE, claim, metadata

from .conftest import NOW, body


def test_the_migrations_build_exactly_the_tables_of_the_code(engine: Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "target_metadata": metadata}
        )
        differences = [d for d in compare_metadata(context, metadata) if VERSION_TABLE not in str(d)]
    assert differences == []


def test_migrating_twice_changes_nothing_and_down_removes_all(database_url: str, engine: Engine) -> None:
    migrate(database_url)
    newest = GpuDBManager.revision_heads_map["0.1.0"]
    assert current_revision(database_url) == newest
    command.downgrade(alembic_config(database_url), "base")
    left = [name for name in inspect(engine).get_table_names() if name != VERSION_TABLE]
    assert left == []


_LEASED = (
    "INSERT INTO gpu_claim (id, dag_id, run_id, task_id, map_index, try_number, request, value, run_type,"
    " excluded, submitted_at, state) SELECT id, 'd', 'r', id, -1, 1, '{}', 0, 'live',"
    " '[]', CURRENT_TIMESTAMP, 'granted' FROM (SELECT 'one' AS id UNION SELECT 'two') AS ids",
    "INSERT INTO gpu_lease (id, claim_id, epoch, match_degree, granted_at, expires_at)"
    " SELECT id, id, 1, 1, submitted_at, submitted_at FROM gpu_claim",
)
_HOLD = """INSERT INTO gpu_lease_device (lease_id, device_id, node, rank, is_spare)
VALUES (:lease, 'a', 'n1', 0, 0)"""
_HOLD_HALF = """INSERT INTO gpu_lease_device (lease_id, device_id, node, rank, is_spare, milli)
VALUES (:lease, 'a', 'n1', 0, 0, 500)"""


def rows_in(engine: Engine) -> list[int]:
    tables = ("gpu_claim", "gpu_lease", "gpu_lease_device")
    with engine.connect() as connection:
        return [connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() for name in tables]


def test_live_leases_survive_every_migration_up_and_down(database_url: str, engine: Engine) -> None:
    config = alembic_config(database_url)
    scripts = ScriptDirectory.from_config(config)
    first, *others = (each.revision for each in reversed(list(scripts.walk_revisions())))
    command.downgrade(config, first)
    with engine.begin() as connection:
        for statement in _LEASED:
            connection.execute(text(statement))
        connection.execute(text(_HOLD), {"lease": "one"})
    for revision in others:
        migrate(database_url, revision)
        assert rows_in(engine) == [2, 2, 1], f"after the upgrade to {revision}"
    with pytest.raises(IntegrityError, match="exceed"), engine.begin() as connection:
        connection.execute(text(_HOLD_HALF), {"lease": "two"})
    with engine.connect() as connection:
        added = select(claim.c.preemptible, claim.c.preemptions, claim.c.preempted_by)
        assert connection.execute(added).first() == (False, 0, [])
    for revision in reversed([first, *others[:-1]]):
        command.downgrade(config, revision)
        assert rows_in(engine) == [2, 2, 1], f"after the downgrade to {revision}"
    with pytest.raises(IntegrityError), engine.begin() as connection:
        connection.execute(text(_HOLD), {"lease": "two"})


def test_another_kind_of_database_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"mysql database; the broker runs on PostgreSQL or SQLite"):
        make_engine("mysql://user@localhost/db")


def test_a_database_without_tables_has_no_revision(tmp_path: Path) -> None:
    assert current_revision(f"sqlite:///{tmp_path}/empty.db") is None


def test_a_migration_loses_no_row_that_refers_to_a_table_it_makes_anew(
    database_url: str, engine: Engine
) -> None:
    command.downgrade(alembic_config(database_url), "0009")
    claimed = {"id": "c", "dag_id": "d", "run_id": "r", "task_id": "t", "map_index": -1, "try_number": 1}
    was = {
        name: value
        for name, value in new_claim_row("c", body(), (), NOW).items()
        if name not in ("completes", "outlives_worker")
    }
    held = {"id": "l", "claim_id": "c", "epoch": 1, "match_degree": 1.0}
    with engine.begin() as connection:
        for table, row in (
            (tables.claim, was | claimed),
            (tables.lease, held | {"granted_at": NOW, "expires_at": NOW}),
            (tables.lease_device, {"lease_id": "l", "device_id": "g", "node": "n", "rank": 0, "is_spare": 0}),
        ):
            connection.execute(insert(table), [row])
    migrate(database_url)
    with engine.connect() as connection:
        assert connection.execute(select(tables.lease_device.c.device_id)).scalars().all() == ["g"]
