"""What people are told when the broker's database is wrong or away."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text

from airflow_gpu_provider.exceptions import BrokerUnavailable, InvalidRequest
from airflow_gpu_provider.store.engine import make_engine
from airflow_gpu_provider.store.wrong_database import explained


def error_of(url: str, statement: str = "SELECT 1") -> Exception:
    with pytest.raises(Exception) as raised, make_engine(url).connect() as connection:
        connection.execute(text(statement))
    return raised.value


@pytest.mark.parametrize(
    "url, reason",
    [
        ("garbage", "database_url"),
        ("postgresql+nothing://host/name", "database_url"),
        ("postgresql+cx_none://host/name", "database_url"),
        ("sqlite:////no/such/folder/broker.db", "database_file"),
    ],
)
def test_what_only_a_person_can_mend_is_told_in_a_sentence(url: str, reason: str) -> None:
    told = explained(error_of(url))
    assert isinstance(told, InvalidRequest) and told.reason == reason
    assert "sql_alchemy_conn" in told.message and "\n" not in told.message


def test_tables_that_are_missing_are_told_by_the_command_that_makes_them(tmp_path: Path) -> None:
    told = explained(error_of(f"sqlite:///{tmp_path}/empty.db", "SELECT * FROM gpu_node"))
    assert isinstance(told, BrokerUnavailable) and "airflow db migrate" in told.message


def test_a_server_that_is_away_may_come_back() -> None:
    told = explained(error_of("postgresql+psycopg2://user:secret@127.0.0.1:9/name"))
    assert isinstance(told, BrokerUnavailable) and "secret" not in told.message


def test_an_error_of_another_kind_keeps_its_trace() -> None:
    assert explained(ValueError("x")) is None
