"""One process at a time for a broker on SQLite: the second is refused while the first lives.

SQLite lets one process write at a time, so a second broker would not share the work, only wait for the lock
and lead with a clock of its own. The kernel keeps the mark and drops it with the process, however that ends:
nothing is left to clean up. Replicas need PostgreSQL, where `leadership` elects one of them.
"""

from __future__ import annotations

import fcntl
import os
import pwd

from sqlalchemy import Engine

from airflow_gpu_provider.exceptions import BrokerUnavailable


class SoleProcess:
    """The right of this process to serve the broker of a SQLite file; on PostgreSQL everybody has it."""

    def __init__(self, engine: Engine) -> None:
        name = engine.url.database if engine.dialect.name == "sqlite" else None
        self._path = None if not name or name == ":memory:" else f"{name}.gpu-broker"
        self._file: int | None = None

    def take(self) -> None:
        """Raise BrokerUnavailable, which says what to do, while another process serves this database."""
        if self._path is None or self._file is not None:
            return
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _no_mark(self._path, error) from None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(file, 20).decode(errors="replace").strip() or "unknown"
            os.close(file)
            served = self._path.removesuffix(".gpu-broker")
            raise BrokerUnavailable(
                f"Another process (pid {holder}) serves the GPU broker of {served} already, and SQLite is "
                "for one. Stop that one, run the API server with one worker, or set [gpu] sql_alchemy_conn "
                "to a PostgreSQL database: there any number of replicas share the work.",
                reason="second_process",
            ) from None
        os.truncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        self._file = file

    def give_up(self) -> None:
        """Let another process take it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _no_mark(path: str, error: OSError) -> BrokerUnavailable:
    """Return why the mark cannot be made or opened: most often an earlier broker ran as another user."""
    try:
        owner = f" (it belongs to user {_name_of(os.stat(path).st_uid)})"
    except OSError:
        owner = ""
    return BrokerUnavailable(
        f"The mark {path}{owner}, by which only one process serves a SQLite database, cannot be opened as "
        f"user {_name_of(os.geteuid())}: {error.strerror}. Serve the broker as the user that owns the "
        "database, or give that user the database's folder and, while no broker runs, remove the mark; or "
        "set [gpu] sql_alchemy_conn to a PostgreSQL database, which needs no mark.",
        reason="no_mark",
    )


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # in a container, users often have no name
        return str(uid)
