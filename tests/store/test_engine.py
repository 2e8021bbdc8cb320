from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, insert, select
from sqlalchemy.exc import DBAPIError

from airflow_gpu_provider.exceptions import BrokerUnavailable
from airflow_gpu_provider.store.engine import allow_migrations, looking, make_engine, writing
from airflow_gpu_provider.store.leadership import Leadership, StaleTerm, fence
from airflow_gpu_provider.store.sole import SoleProcess
from airflow_gpu_provider.store.tables import event


@pytest.fixture
def postgres(migrated_postgres_url: str) -> Iterator[Engine]:
    engine = make_engine(migrated_postgres_url)
    yield engine
    engine.dispose()


def test_a_leader_that_freezes_within_a_transaction_does_not_block_the_next_one(postgres: Engine) -> None:
    frozen, other = Leadership(postgres, "frozen", 0.5), Leadership(postgres, "other", 5)
    term = frozen.acquire()
    assert term is not None
    begun = time.monotonic()
    with pytest.raises(DBAPIError), writing(postgres) as stuck:
        fence(stuck, term)  # holds the election row, and is stopped here by a signal
        stuck.execute(insert(event).values(claim_id="never"))
        while other.acquire() is None:
            assert time.monotonic() - begun < 30, "the frozen leader's lock holds the others off for ever"
            time.sleep(0.05)
        stuck.execute(insert(event).values(claim_id="late"))  # it wakes up
    with postgres.connect() as connection:
        assert connection.scalars(select(event.c.claim_id)).all() == []
    with pytest.raises(StaleTerm), writing(postgres) as connection:
        fence(connection, term)


def test_waits_are_bounded_in_each_transaction_and_nothing_stays_in_a_session_that_a_pooler_shares(
    postgres: Engine,
) -> None:
    def bounds(connection: Connection) -> list[str]:
        names = ("lock_timeout", "idle_in_transaction_session_timeout")
        return [str(connection.exec_driver_sql(f"SHOW {name}").scalar()) for name in names]

    for transaction in (writing, looking):
        with transaction(postgres) as connection:
            connection.exec_driver_sql("SELECT 1")
        raw = postgres.raw_connection()
        raw.cursor().execute("RESET ALL")  # what a pooler gives next has none of our settings
        raw.commit()
        raw.close()
        with transaction(postgres) as connection:
            assert bounds(connection) == ["5s", "1s"], transaction
    with postgres.connect().execution_options(isolation_level="AUTOCOMMIT") as others:
        assert bounds(others) == ["0", "0"]
    with postgres.connect() as connection:
        allow_migrations(connection)
        assert bounds(connection) == ["5s", "0"]


def test_a_mark_of_another_user_is_told_with_its_owner_and_what_to_do() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        mark = Path(folder, "gpu.db.gpu-broker")
        mark.touch(mode=0o400)
        sole = SoleProcess(make_engine(f"sqlite:///{folder}/gpu.db"))
        told = "belongs to user .*PostgreSQL"
        with as_nobody(), pytest.raises(BrokerUnavailable, match=told) as refused:
            sole.take()
        assert refused.value.reason == "no_mark" and str(mark) in refused.value.message


@contextmanager
def as_nobody() -> Iterator[None]:
    """Be a user who may not write where this one may; who is not root is refused as it is."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_second_process_on_sqlite_is_told_what_to_do_until_the_first_ends(tmp_path: Path) -> None:
    sole = SoleProcess(make_engine(f"sqlite:///{tmp_path}/gpu.db"))
    first = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "file.write('4711'); file.flush(); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", first, f"{tmp_path}/gpu.db.gpu-broker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(BrokerUnavailable, match=r"pid 4711.*PostgreSQL.*any number of replicas"):
            sole.take()
        process.kill()
    sole.take()
    sole.give_up()


def test_any_number_of_processes_share_a_postgresql_database(postgres: Engine) -> None:
    first, second = SoleProcess(postgres), SoleProcess(postgres)
    first.take()
    second.take()
