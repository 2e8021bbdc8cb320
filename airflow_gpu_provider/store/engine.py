"""Engines for the broker's database, with the two dialects made to behave alike.

On SQLite a write transaction takes the write lock at once (`BEGIN IMMEDIATE`): a read that later turns into
a write fails with "database is locked" under WAL, whatever the timeout. On PostgreSQL each transaction bounds
its own waits, since a pooler such as PgBouncer may give the session to somebody else after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from airflow_gpu_provider.exceptions import InvalidRequest

_WRITES = {"gpu_writes": True}  # execution option of a connection that will write
_THINKS = {"gpu_thinks": True}  # and of one that may sleep between two statements
_SQLITE_WAIT_S = 30
_FROZEN_MS = 1000  # PostgreSQL ends a session that sleeps this long inside a transaction
_LOCKED_MS = 5000
_LOCKS = f"SET LOCAL lock_timeout = {_LOCKED_MS}"
#: Begins a transaction: nobody waits for ever for a replica that was frozen inside one.
BOUNDED = f"{_LOCKS};\nSET LOCAL idle_in_transaction_session_timeout = {_FROZEN_MS}"


def make_engine(url: str) -> Engine:
    """Return an engine for `url`; raise InvalidRequest for a database that is not supported."""
    parsed = make_url(url)
    dialect = parsed.get_backend_name()
    if dialect not in ("sqlite", "postgresql"):
        raise InvalidRequest(
            f"[gpu] sql_alchemy_conn names a {dialect} database; the broker runs on PostgreSQL or SQLite. "
            "Set [gpu] sql_alchemy_conn to one of these.",
            reason="unsupported_database",
        )
    if dialect == "postgresql":
        # No ping before each use: it doubled the round trips of a turn. After a restart of the server the
        # first statement fails, the pool starts anew, and whoever asked is told to ask again.
        engine = create_engine(url, pool_size=10, max_overflow=20)
        event.listen(engine, "begin", _begin_postgresql)
        return engine
    engine = create_engine(url, connect_args={"timeout": _SQLITE_WAIT_S, "check_same_thread": False})
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """Yield a connection in a transaction that will write; it is committed when the block ends."""
    with engine.connect().execution_options(**_WRITES) as connection, connection.begin():
        yield connection


@contextmanager
def looking(engine: Engine) -> Iterator[Connection]:
    """Yield a connection whose statements all see the tables as of the first one."""
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":  # on SQLite every transaction is like that
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
        yield connection


def allow_migrations(connection: Connection) -> None:
    """Let migrations replace tables and take their time. Call it before the connection's first transaction.

    SQLite changes most of a table by dropping it for a new one; with foreign keys enforced, dropping the
    claims would delete all leases with them. Within a transaction the switch does nothing. On PostgreSQL a
    migration that thinks for a second between two statements is not a frozen replica.
    """
    if connection.dialect.name == "sqlite":
        cursor = connection.connection.cursor()
        cursor.execute("PRAGMA foreign_keys=OFF")
        cursor.close()
    else:
        connection.execution_options(**_THINKS)


def _begin_postgresql(connection: Connection) -> None:
    options = connection.get_execution_options()
    # Without a transaction there is none to be frozen in, and a LOCAL setting would be for nothing.
    if options.get("isolation_level") != "AUTOCOMMIT":
        connection.exec_driver_sql(_LOCKS if options.get("gpu_thinks") else BOUNDED)


def _configure_sqlite(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
    raw: Any = connection
    raw.isolation_level = None  # we say BEGIN ourselves
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("gpu_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
