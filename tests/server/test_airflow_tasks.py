"""Task states are read from a real database, over a connection of its own that waits for nobody for ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from airflow import settings
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import OperationalError

from airflow_gpu_provider.server import airflow_tasks
from airflow_gpu_provider.server.airflow_tasks import AirflowTasks
from airflow_gpu_provider.server.reconciler import TaskState

_COLUMNS = "dag_id text, run_id text, task_id text, map_index int, state text, try_number int"


@pytest.fixture
def metadata(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Yield Airflow's database, with two task instances."""
    monkeypatch.setattr(settings, "SQL_ALCHEMY_CONN", postgres_url)
    engine = create_engine(postgres_url)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE task_instance ({_COLUMNS})"))
        connection.execute(
            text("INSERT INTO task_instance VALUES ('d','r','t',-1,'running',2), ('d','r','u',3,NULL,1)")
        )
    yield engine
    engine.dispose()


def test_a_task_that_there_is_has_its_state_and_others_have_none(metadata: Engine) -> None:
    many = [("d", "r", f"gone-{number}", -1) for number in range(600)]
    found = AirflowTasks()([("d", "r", "t", -1), *many, ("d", "r", "u", 3)])
    assert found == {("d", "r", "t", -1): TaskState("running", 2), ("d", "r", "u", 3): TaskState(None, 1)}


def test_a_table_that_is_locked_is_not_waited_for_for_ever(
    metadata: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(airflow_tasks, "_BOUND_S", 1)
    tasks = AirflowTasks()
    with metadata.connect() as migration:
        migration.execute(text("LOCK TABLE task_instance IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(OperationalError, match="statement timeout"):
            tasks([("d", "r", "t", -1)])
    assert tasks([("d", "r", "t", -1)]), "the next question is answered"
