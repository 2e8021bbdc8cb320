"""Alembic's entry point for the broker's tables."""

from __future__ import annotations

from alembic import context

from airflow_gpu_provider.store.engine import allow_migrations, make_engine
from airflow_gpu_provider.store.tables import VERSION_TABLE, metadata

url = context.config.get_main_option("sqlalchemy.url") or ""

if context.is_offline_mode():
    context.configure(
        url=url,
        target_metadata=metadata,
        version_table=VERSION_TABLE,
        literal_binds=True,
        render_as_batch=True,
    )
    with context.begin_transaction():
        context.run_migrations()
else:
    engine = make_engine(url)
    with engine.connect() as connection:
        allow_migrations(connection)
        context.configure(
            connection=connection,
            target_metadata=metadata,
            version_table=VERSION_TABLE,
            render_as_batch=True,
            # The tables may share a database with Airflow: autogenerate must not see the others.
            include_name=lambda name, kind, _parents: kind != "table" or str(name).startswith("gpu_"),
        )
        with context.begin_transaction():
            context.run_migrations()
        if connection.in_transaction():
            connection.commit()
    engine.dispose()
