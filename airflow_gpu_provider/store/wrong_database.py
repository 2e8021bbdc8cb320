"""What a database error at the start means: one sentence that says what to do, and whether time can mend it.

A server that is away comes back; tables appear when they are migrated. A URL that names no database, a driver
that is not installed or a missing folder stay wrong until somebody corrects them.
"""

from __future__ import annotations

from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError, ProgrammingError

from airflow_gpu_provider.exceptions import BrokerUnavailable, GpuProviderError, InvalidRequest

_OPTION = "[gpu] sql_alchemy_conn (or, when that is empty, [database] sql_alchemy_conn)"
_NO_TABLE = ("no such table", "undefinedtable", "does not exist")


def explained(error: Exception) -> GpuProviderError | None:
    """Return the error that teaches what to do, None when this is no error of a database."""
    if isinstance(error, NoSuchModuleError | ArgumentError):  # its words may show the password
        return InvalidRequest(
            f"{_OPTION} is no URL of a database: write e.g. postgresql+psycopg2://user:password@host/name.",
            reason="database_url",
        )
    if isinstance(error, ImportError):
        return InvalidRequest(
            f"{_OPTION} needs a driver that is not installed ({error.name}): install it, or name another "
            "driver, e.g. postgresql+psycopg2://.",
            reason="database_driver",
        )
    if not isinstance(error, DBAPIError):
        return None
    words = " ".join(str(error.orig).split())
    kind = type(error.orig).__name__.lower()
    is_table = isinstance(error, OperationalError | ProgrammingError) and "gpu_" in words
    if is_table and any(each in f"{kind} {words}".lower() for each in _NO_TABLE):
        return BrokerUnavailable(
            f"The broker's tables are missing ({words[:80]}): run `airflow db migrate`.",
            reason="not_migrated",
        )
    if "unable to open database file" in words:
        return InvalidRequest(
            f"{_OPTION} names an SQLite file that cannot be opened: its folder must exist and be writable.",
            reason="database_file",
        )
    return BrokerUnavailable(f"The broker's database failed: {words[:200]}", reason="database_failed")
