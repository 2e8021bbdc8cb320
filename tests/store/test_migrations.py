from __future__ import annotations

from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, inspect

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.store.db_manager import GpuDBManager, alembic_config, current_revision, migrate
from airflow_gpu_provider.store.engine import make_engine
from airflow_gpu_provider.store.tables import VERSION_TABLE, metadata


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


def test_another_kind_of_database_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"mysql database; the broker runs on PostgreSQL or SQLite"):
        make_engine("mysql://user@localhost/db")


def test_a_database_without_tables_has_no_revision(tmp_path: Path) -> None:
    assert current_revision(f"sqlite:///{tmp_path}/empty.db") is None
