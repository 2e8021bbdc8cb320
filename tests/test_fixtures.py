"""The shared fixtures do what their tests rely on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy

DAG = """
from airflow.sdk import dag, task

@dag(schedule=None, params={"who": "nobody"})
def greeting():
    @task
    def names():
        return ["a", "b"]

    @task
    def greet(name, params=None):
        print("hello", name, "and", params["who"])
        if params["who"] == "an enemy":
            raise ValueError("no greeting for an enemy")

    greet.expand(name=names())

greeting()
"""


def test_a_dag_runs_by_dag_test_with_its_conf(tmp_path: Path, dag_test: Callable[..., Any]) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "greeting.py").write_text(DAG)
    result = dag_test(folder, "greeting", {"who": "a friend"})
    assert result.state == "success"
    assert result.tasks == {"names": "success", "greet[0]": "success", "greet[1]": "success"}
    assert "hello b and a friend" in result.output
    assert dag_test(folder, "greeting", {"who": "an enemy"}).state == "failed"


def test_a_postgres_database_is_empty_and_speaks_sql(postgres_url: str) -> None:
    engine = sqlalchemy.create_engine(postgres_url)
    with engine.connect() as connection:
        assert sqlalchemy.inspect(connection).get_table_names() == []
        assert "PostgreSQL" in str(connection.execute(sqlalchemy.text("select version()")).scalar())
    engine.dispose()
