"""The database itself lets nobody have more of a device than there is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from alembic import command
from sqlalchemy import Engine, insert, update
from sqlalchemy.exc import IntegrityError

from airflow_gpu_provider.store.db_manager import alembic_config, migrate
from airflow_gpu_provider.store.endings import Ending
from airflow_gpu_provider.store.leadership import Term
from airflow_gpu_provider.store.repository import Repository
from airflow_gpu_provider.store.tables import lease_device
from airflow_gpu_provider.store.turns import Turn, TurnStore
from tests.stored_rows import counts

from .conftest import NOW, body, granting, lease_id_of

Give = Callable[..., None]


@pytest.fixture
def claims(repository: Repository) -> list[str]:
    """Return claims that wait."""
    return [repository.submit(body(f"t{number}"), now=NOW, usable=()) for number in range(5)]


def test_shares_that_a_device_has_room_for_live_beside_each_other(
    repository: Repository, grant: Give, claims: list[str]
) -> None:
    for claim_id, milli in zip(claims, (500, 250, 250), strict=False):
        grant(claim_id, "GPU-a", milli=milli)
    assert counts(repository) == (2, 3, 1)
    assert [held.shares for held, _ in repository.live_leases(claims[:1])] == [(500,)]


@pytest.mark.parametrize(
    ("before", "milli"), [((500, 250), 251), ((1,), 1000), ((1000,), 1), ((1000,), 1000)]
)
def test_what_a_device_has_no_room_for_is_refused_with_the_whole_turn(
    repository: Repository, grant: Give, claims: list[str], before: tuple[int, ...], milli: int
) -> None:
    for claim_id, held in zip(claims, before, strict=False):
        grant(claim_id, "GPU-a", milli=held)
    with pytest.raises(IntegrityError):
        grant(claims[-1], "GPU-b", "GPU-a", milli=milli)
    assert counts(repository) == (5 - len(before), len(before), 1)


def test_grants_of_one_turn_count_together(
    turns: TurnStore, term: Term, repository: Repository, claims: list[str]
) -> None:
    with pytest.raises(IntegrityError):
        turns.write(term, Turn(NOW, grants=[granting(each, "GPU-a", milli=400) for each in claims[:3]]))
    turns.write(term, Turn(NOW, grants=[granting(each, "GPU-a", milli=400) for each in claims[:2]]))
    assert counts(repository) == (3, 2, 1)


def test_what_ends_in_a_turn_makes_room_for_what_begins_in_it(
    turns: TurnStore, term: Term, repository: Repository, grant: Give, claims: list[str]
) -> None:
    first, second, whole = claims[:3]
    grant(first, "GPU-a", milli=600)
    grant(second, "GPU-a", milli=400)
    ending = [Ending(each, "released", lease_id_of(each), "done") for each in (first, second)]
    turns.write(term, Turn(NOW, endings=ending, grants=[granting(whole, "GPU-a")]))
    assert counts(repository) == (2, 1, 1)


def test_a_share_grows_only_into_what_is_free(
    engine: Engine, repository: Repository, grant: Give, claims: list[str]
) -> None:
    grant(claims[0], "GPU-a", milli=500)
    grant(claims[1], "GPU-a", milli=300)
    grow = update(lease_device).where(lease_device.c.lease_id == lease_id_of(claims[0]))
    with engine.begin() as connection:
        connection.execute(grow.values(milli=700))
    with pytest.raises(IntegrityError), engine.begin() as connection:
        connection.execute(grow.values(milli=701))


def test_ended_leases_count_for_nothing(repository: Repository, grant: Give, claims: list[str]) -> None:
    grant(claims[0], "GPU-a", milli=900)
    repository.cancel(claims[0], now=NOW)
    grant(claims[1], "GPU-a")
    assert counts(repository) == (3, 1, 1)


def test_leases_of_before_the_migration_hold_whole_devices(
    database_url: str, engine: Engine, repository: Repository, grant: Give, claims: list[str]
) -> None:
    grant(claims[0], "GPU-a")
    command.downgrade(alembic_config(database_url), "0006")
    migrate(database_url)
    row = {"lease_id": lease_id_of(claims[0]), "device_id": "GPU-b", "node": "n", "rank": 1, "is_spare": 0}
    with engine.begin() as connection:
        connection.execute(insert(lease_device), [row])
    ((held, _),) = repository.live_leases()
    assert (held.devices, held.shares) == (("GPU-a", "GPU-b"), ())
    with pytest.raises(IntegrityError):
        grant(claims[1], "GPU-a", milli=1)
