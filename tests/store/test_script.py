from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, bindparam, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError

from airflow_gpu_provider.store.script import Scripts, one_of
from airflow_gpu_provider.store.tables import event, leader

_MOVE = update(event).where(one_of(event.c.claim_id, "ids")).values(claim_id=bindparam("to"))


@pytest.fixture
def scripts(engine: Engine) -> Iterator[Scripts]:
    scripts = Scripts(engine)
    yield scripts
    scripts.close()


class Refused(Exception):
    """What the test's requirement says."""


def claims(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(select(event.c.claim_id).order_by(event.c.id)))


def test_what_a_script_says_is_written_together_when_it_ends(engine: Engine, scripts: Scripts) -> None:
    with scripts.transaction() as script:
        script.insert(event, [{"claim_id": name} for name in ("a", "b", "it's 100 %s; --")])
        script.run(_MOVE, ids=["a", "it's 100 %s; --", "unknown"], to="moved % ' \\ :x")
        script.require(_MOVE, 1, Refused("never"), ids=["b"], to="c")
    assert claims(engine) == ["moved % ' \\ :x", "c", "moved % ' \\ :x"]


def test_nothing_is_written_when_a_requirement_is_not_met(engine: Engine, scripts: Scripts) -> None:
    with pytest.raises(Refused, match="second"), scripts.transaction() as script:
        script.insert(event, [{"claim_id": "a"}])
        script.require(_MOVE, 1, Refused("first"), ids=["a"], to="b")
        script.require(_MOVE, 2, Refused("second"), ids=["b"], to="c")
        script.require(_MOVE, 9, Refused("third"), ids=["c"], to="d")
    assert claims(engine) == []


def test_rows_that_exist_refuse_an_insert_of_new_ones(engine: Engine, scripts: Scripts) -> None:
    rows = [{"id": number, "claim_id": "a"} for number in (1, 2)]
    with scripts.transaction() as script:
        script.insert_new(event, rows[:1], Refused("never"))
    with pytest.raises(Refused, match="known"), scripts.transaction() as script:
        script.insert_new(event, rows, Refused("known"))
    assert claims(engine) == ["a"]


def test_a_broken_constraint_is_an_error_and_leaves_nothing(engine: Engine, scripts: Scripts) -> None:
    with pytest.raises(IntegrityError), scripts.transaction() as script:
        script.insert(event, [{"id": 7, "claim_id": "a"}])
        script.insert(event, [{"id": 7, "claim_id": "b"}])
    assert claims(engine) == []


def test_the_error_of_a_long_script_is_short(engine: Engine, scripts: Scripts) -> None:
    with pytest.raises(IntegrityError) as failed, scripts.transaction() as script:
        script.insert(event, [{"id": number % 1999, "claim_id": "x" * 30} for number in range(2000)])
    assert "UNIQUE" in str(failed.value).upper()
    assert len(str(failed.value)) < 2000


def test_a_script_that_is_given_up_writes_nothing(engine: Engine, scripts: Scripts) -> None:
    with pytest.raises(Refused), scripts.transaction() as script:
        script.insert(event, [{"claim_id": "a"}])
        raise Refused("before its end")
    assert claims(engine) == []


def test_a_list_without_ids_matches_nothing(engine: Engine, scripts: Scripts) -> None:
    with scripts.transaction() as script:
        script.insert(event, [{"claim_id": "a"}])
        script.run(_MOVE, ids=[], to="b")
        nobody = select(leader.c.id).where(leader.c.id == bindparam("key"))
        script.require(nobody, 0, Refused("never"), key=5)
    assert claims(engine) == ["a"]


def test_after_a_broken_connection_the_next_transaction_takes_another(
    engine: Engine, scripts: Scripts
) -> None:
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no connection that breaks")
    with scripts.transaction() as script:
        script.insert(event, [{"claim_id": "a"}])
    with engine.connect() as connection:
        others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        connection.execute(text(f"SELECT pg_terminate_backend(pid) {others}"))
    with pytest.raises(OperationalError), scripts.transaction() as script:
        script.insert(event, [{"claim_id": "b"}])
    with scripts.transaction() as script:
        script.insert(event, [{"claim_id": "c"}])
    assert claims(engine) == ["a", "c"]


def test_a_pool_that_loses_prepared_statements_loses_no_transaction(engine: Engine, scripts: Scripts) -> None:
    if engine.driver != "psycopg2":
        pytest.skip("only PostgreSQL's statements are prepared")
    with scripts.transaction() as script:
        script.insert(event, [{"claim_id": "a"}])
        script.run(_MOVE, ids=["a"], to="b")
    assert scripts._open is not None
    scripts._open.execute(text("DEALLOCATE ALL"))  # as another session behind a pool would have none
    for before, after in (("b", "it's 100 %s"), ("it's 100 %s", "d")):
        with scripts.transaction() as script:
            script.run(_MOVE, ids=[before], to=after)
            script.insert(event, [{"claim_id": after}])
    with pytest.raises(Refused, match="plain"), scripts.transaction() as script:
        script.require(_MOVE, 9, Refused("plain"), ids=["d"], to="e")
    assert claims(engine) == ["d", "d", "d"]
