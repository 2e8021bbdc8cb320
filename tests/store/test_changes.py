"""A live lease changes in the tables as a whole, and what an offer holds nobody else can get."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.exc import IntegrityError

from airflow_gpu_provider.store.changes import Changes, LeasePlace, NewOffer, NewShape
from airflow_gpu_provider.store.leadership import Term
from airflow_gpu_provider.store.repository import Repository
from airflow_gpu_provider.store.rows import StoredLease
from airflow_gpu_provider.store.tables import offer
from airflow_gpu_provider.store.tries import PassedOn
from airflow_gpu_provider.store.turns import Overtaken, Turn, TurnStore
from airflow_gpu_provider.wire import ReleaseBody
from tests.stored_rows import counts

from .conftest import NOW, body, lease_id_of
from .test_turns import row

Give = Callable[..., None]
Write = Callable[[Changes], None]

UNTIL = NOW + timedelta(seconds=60)


@pytest.fixture
def write(turns: TurnStore, term: Term) -> Write:
    return lambda changes: turns.write(term, Turn(NOW, changes=changes))


@pytest.fixture
def lease_id(repository: Repository, grant: Give) -> str:
    """Return a live lease of devices a and b, with spare s."""
    claim_id = repository.submit(body("t", gpus=2), now=NOW, usable=())
    grant(claim_id, "a", "b", spares=("s",))
    return lease_id_of(claim_id)


def asked(gpus: int = 2) -> dict[str, Any]:
    return body(gpus=gpus).request.model_dump(mode="json")


def moving(lease_id: str, *devices: str, held: str) -> Changes:
    """Return an offer to have these devices; the last one of them is not the lease's own."""
    row = {
        "id": "o1",
        "devices": list(devices),
        "request": asked(),
        "phase": "offered",
        "expires_at": UNTIL,
    }
    place = LeasePlace(held, devices.index(held), False, "n1", True)
    return Changes(offers=[NewOffer(lease_id, row, (place,))])


def look(repository: Repository) -> StoredLease:
    ((held, _),) = repository.live_leases()
    return held


def test_members_leave_join_and_change_places(repository: Repository, write: Write, lease_id: str) -> None:
    shape = NewShape(
        lease_id,
        asked(3),
        0.25,
        leave=("a",),
        join=(LeasePlace("c", 2, False, "n2"),),
        stay=(LeasePlace("b", 0, False), LeasePlace("s", 1, False)),
    )
    write(Changes(shapes=[shape]))
    held = look(repository)
    assert (held.devices, held.spares, held.nodes) == (("b", "s", "c"), (), ("n1", "n2"))
    assert (held.row.request, held.row.match_degree) == (asked(3), 0.25)
    assert counts(repository) == (0, 1, 3)


def test_a_device_that_left_can_come_back(repository: Repository, write: Write, lease_id: str) -> None:
    write(Changes(shapes=[NewShape(lease_id, asked(1), 1.0, leave=("b",))]))
    assert look(repository).devices == ("a",)
    write(Changes(shapes=[NewShape(lease_id, asked(2), 1.0, join=(LeasePlace("b", 1, False, "n1"),))]))
    assert look(repository).devices == ("a", "b")


def test_one_lease_takes_in_the_same_turn_what_another_gives(
    repository: Repository, grant: Give, write: Write, lease_id: str
) -> None:
    claim_id = repository.submit(body("u"), now=NOW, usable=())
    grant(claim_id, "c")
    grows = NewShape(lease_id_of(claim_id), asked(2), 1.0, join=(LeasePlace("b", 1, False, "n1"),))
    write(Changes(shapes=[grows, NewShape(lease_id, asked(1), 1.0, leave=("b",))]))
    found = {held.row.id: held.devices for held, _ in repository.live_leases()}
    assert found == {lease_id: ("a",), lease_id_of(claim_id): ("c", "b")}


def test_what_an_offer_holds_is_not_the_leases_yet_and_nobody_elses(
    repository: Repository, grant: Give, write: Write, lease_id: str
) -> None:
    write(moving(lease_id, "a", "x", held="x"))
    held = look(repository)
    assert (held.devices, held.at_work()) == (("a", "b"), ("a", "b", "s"))
    assert held.offer is not None
    assert (held.offer.id, held.offer.devices, held.offer.expires_at) == ("o1", ["a", "x"], UNTIL)
    other = repository.submit(body("u"), now=NOW, usable=())
    with pytest.raises(IntegrityError):
        grant(other, "x")
    write(Changes(accepted={lease_id: UNTIL + timedelta(minutes=9)}))
    assert look(repository).at_work() == ("a", "b", "s", "x")


def test_a_commit_frees_the_old_place_and_names_its_offer(
    repository: Repository, grant: Give, write: Write, lease_id: str
) -> None:
    write(moving(lease_id, "a", "x", held="x"))
    shape = NewShape(
        lease_id, asked(), 1.0, leave=("b", "s"), stay=(LeasePlace("x", 1, False),), moved_by="o1"
    )
    write(Changes(shapes=[shape]))
    held = look(repository)
    assert (held.devices, held.spares, held.offer, held.row.moved_by) == (("a", "x"), (), None, "o1")
    grant(repository.submit(body("u"), now=NOW, usable=()), "b")
    assert counts(repository) == (0, 2, 3)


def test_an_offer_that_is_over_frees_the_new_place_only(
    repository: Repository, grant: Give, write: Write, lease_id: str
) -> None:
    write(moving(lease_id, "a", "x", held="x"))
    write(Changes(withdrawn=[lease_id]))
    held = look(repository)
    assert (held.devices, held.spares, held.offer) == (("a", "b"), ("s",), None)
    grant(repository.submit(body("u"), now=NOW, usable=()), "x")


def test_an_offer_may_follow_another_in_the_same_turn(
    repository: Repository, write: Write, lease_id: str
) -> None:
    write(moving(lease_id, "a", "x", held="x"))
    again = moving(lease_id, "a", "y", held="y")
    again.withdrawn.append(lease_id)
    write(again)
    held = look(repository)
    assert held.offer is not None and held.offer.devices == ["a", "y"]
    assert counts(repository) == (0, 1, 4)


def test_a_lease_that_another_replica_ended_is_not_changed(
    repository: Repository, write: Write, lease_id: str
) -> None:
    released = ReleaseBody(secret="s", epoch=1)
    repository.release(lease_id, released, now=NOW, device_of=lambda device: None)
    grows = NewShape(lease_id, asked(3), 1.0, join=(LeasePlace("c", 2, False, "n1"),))
    for changes in (
        Changes(shapes=[grows]),
        moving(lease_id, "a", "x", held="x"),
        Changes(accepted={lease_id: UNTIL}),
    ):
        with pytest.raises(Overtaken, match="ended by another replica"):
            write(changes)
    assert counts(repository) == (0, 0, 0)


def test_what_an_offer_holds_ends_with_its_lease(
    engine: Engine, repository: Repository, write: Write, lease_id: str
) -> None:
    write(moving(lease_id, "a", "x", held="x"))
    released = ReleaseBody(secret="s", epoch=1)
    repository.release(lease_id, released, now=NOW, device_of=lambda device: None)
    assert counts(repository) == (0, 0, 0)
    assert repository.live_leases() == []


@pytest.mark.parametrize("by_leader", [True, False])
def test_the_next_try_takes_over_the_lease_without_its_offer(
    engine: Engine,
    repository: Repository,
    turns: TurnStore,
    term: Term,
    write: Write,
    lease_id: str,
    by_leader: bool,
) -> None:
    write(moving(lease_id, "a", "x", held="x"))
    if by_leader:
        ((_, claim),) = repository.live_leases()
        new = {**row("c2", "t", "granted"), "try_number": 2}
        passed = PassedOn(lease_id, claim.id, "c2", 2)
        turns.write(term, Turn(NOW, claims=[new], passed_on=[passed]))
    else:
        repository.submit(body("t", try_number=2, gpus=2), now=NOW, usable=("a", "b", "s"))
    held = look(repository)
    assert (held.row.epoch, held.devices, held.offer) == (2, ("a", "b"), None)
    assert counts(repository) == (0, 1, 3)
    with engine.connect() as connection:
        assert connection.execute(select(offer)).all() == []


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_resized_lease_passes_to_a_next_try_that_asks_for_what_it_is(
    repository: Repository, write: Write, lease_id: str, gpus: int
) -> None:
    write(Changes(shapes=[NewShape(lease_id, asked(1), 1.0, leave=("b",))]))
    repository.submit(body("t", try_number=2, gpus=gpus), now=NOW, usable=("a", "s"))
    assert len(repository.live_leases()) == (1 if gpus == 1 else 0)
