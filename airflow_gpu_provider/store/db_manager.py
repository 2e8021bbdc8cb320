"""Creates and upgrades the broker's tables as part of `airflow db migrate`.

Migrations always run, also on an empty database, so that the tables can never differ from what the
migrations build. With `[gpu] sql_alchemy_conn` set, they go to that database instead of Airflow's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from airflow.utils.db_manager import BaseDBManager
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.store.engine import make_engine
from airflow_gpu_provider.store.tables import VERSION_TABLE, metadata

_HERE = Path(__file__).parent


def alembic_config(url: str) -> Config:
    """Return the Alembic configuration for the database at `url`."""
    config = Config(str(_HERE / "alembic.ini"))
    config.set_main_option("script_location", str(_HERE / "migrations").replace("%", "%%"))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


def migrate(url: str, revision: str = "heads") -> None:
    """Bring the database at `url` to `revision`; do nothing where it is already there."""
    command.upgrade(alembic_config(url), revision)


def current_revision(url: str) -> str | None:
    """Return the revision of the database at `url`, None where the broker has no tables yet."""
    engine = make_engine(url)
    try:
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
            return context.get_current_revision()
    finally:
        engine.dispose()


class GpuDBManager(BaseDBManager):
    """Airflow's door to the broker's migrations."""

    metadata = metadata
    version_table_name = VERSION_TABLE
    migration_dir = str(_HERE / "migrations")
    alembic_file = str(_HERE / "alembic.ini")
    supports_table_dropping = True
    revision_heads_map = {"0.1.0": "0014"}  # noqa: RUF012 - Airflow's own form

    def get_alembic_config(self) -> Config:
        """Return the configuration for the broker's database, which may be one of its own."""
        return alembic_config(Settings.load().database_url())

    def get_current_revision(self) -> str | None:
        """Return the revision of the broker's database."""
        return current_revision(Settings.load().database_url())

    def create_db_from_orm(self) -> None:
        """Run the migrations: tables have one origin only."""
        self._release_session()
        command.upgrade(self.get_alembic_config(), "heads")

    def upgradedb(
        self,
        to_revision: str | None = None,
        from_revision: str | None = None,
        show_sql_only: bool = False,
        use_migration_files: bool = False,
    ) -> None:
        """Upgrade to `to_revision`, by default the newest."""
        self._release_session()
        command.upgrade(self.get_alembic_config(), revision=to_revision or "heads", sql=show_sql_only)
        self.log.info("Migrated the GPU broker's tables")

    def initdb(self, use_migration_files: bool = False) -> None:
        """Create the tables, or upgrade them."""
        self.upgradedb(use_migration_files=use_migration_files)

    def downgrade(
        self, to_revision: str, from_revision: str | None = None, show_sql_only: bool = False
    ) -> None:
        """Downgrade to `to_revision`; `base` removes the broker's tables."""
        self._release_session()
        command.downgrade(self.get_alembic_config(), revision=to_revision, sql=show_sql_only)

    def drop_tables(self, connection: Any) -> None:
        """Drop the tables as part of `airflow db reset`, in whichever database they are."""
        if Settings.load().sql_alchemy_conn:
            command.downgrade(self.get_alembic_config(), "base")
        else:
            super().drop_tables(connection)

    def _release_session(self) -> None:
        # Alembic opens a connection of its own: on SQLite Airflow's open transaction would lock it out.
        self.session.commit()
