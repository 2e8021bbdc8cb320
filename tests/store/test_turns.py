from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.exc import IntegrityError

from airflow_gpu_provider.store.changes import Changes, NewShape
from airflow_gpu_provider.store.endings import Ending
from airflow_gpu_provider.store.leadership import Leadership, StaleTerm, Term
from airflow_gpu_provider.store.repository import Repository
from airflow_gpu_provider.store.tables import claim, lease
from airflow_gpu_provider.store.tries import PassedOn
from airflow_gpu_provider.store.turns import Overtaken, Turn, TurnStore
from airflow_gpu_provider.wire import ReleaseBody
from tests.stored_rows import claims, counts, pending

from .conftest import NOW, body, granting, lease_id_of

Give = Callable[..., None]


def row(claim_id: str, task: str = "t", state: str = "pending") -> dict[str, Any]:
    """Return a row of the claim table as the desk makes it."""
    asked = body(task)
    return {
        "id": claim_id,
        **asked.key.model_dump(),
        "ti_id": None,
        "owner": None,
        "request": asked.request.model_dump(mode="json"),
        "value": 0.0,
        "run_type": "live",
        "excluded": [],
        "submitted_at": NOW,
        "state": state,
    }


def nobody(_device: str) -> None:
    """Know no device."""


def state_of(engine: Engine, claim_id: str) -> tuple[str, str | None]:
    with engine.connect() as connection:
        found = connection.execute(select(claim.c.state, claim.c.reason_code).where(claim.c.id == claim_id))
        state, code = found.one()
        return state, code


def test_a_claim_can_be_stored_and_granted_in_one_turn(
    engine: Engine, turns: TurnStore, term: Term, repository: Repository
) -> None:
    turn = Turn(NOW, claims=[row("c1", state="granted")], grants=[granting("c1", "GPU-a")])
    turns.write(term, turn)
    assert state_of(engine, "c1") == ("granted", None)
    assert counts(repository) == (0, 1, 1)


def test_the_database_refuses_a_device_in_two_live_leases(repository: Repository, grant: Give) -> None:
    first = repository.submit(body("one"), now=NOW, usable=())
    second = repository.submit(body("two"), now=NOW, usable=())
    grant(first, "GPU-a", "GPU-b")
    with pytest.raises(IntegrityError):
        grant(second, "GPU-c", "GPU-b")
    assert [each.id for each in pending(repository)] == [second], "nothing of a refused turn is kept"
    assert counts(repository) == (1, 1, 2)


def test_a_claim_withdrawn_meanwhile_is_not_granted(repository: Repository, grant: Give) -> None:
    claim_id = repository.submit(body(), now=NOW, usable=())
    repository.cancel(claim_id, now=NOW)
    with pytest.raises(Overtaken, match="withdrawn"):
        grant(claim_id, "GPU-a")
    assert counts(repository) == (0, 0, 0)


def test_a_task_try_that_another_replica_stored_is_not_stored_twice(
    turns: TurnStore, term: Term, repository: Repository
) -> None:
    repository.submit(body("t"), now=NOW, usable=())
    with pytest.raises(Overtaken, match="same task try"):
        turns.write(term, Turn(NOW, claims=[row("c1", "t"), row("c2", "u")]))
    assert len(pending(repository)) == 1


def test_a_lease_renewed_meanwhile_does_not_expire(
    turns: TurnStore, term: Term, repository: Repository, grant: Give
) -> None:
    claim_id = repository.submit(body(), now=NOW, usable=())
    grant(claim_id, "GPU-a")
    lease_id = lease_id_of(claim_id)
    repository.renew(lease_id, 1, now=NOW + timedelta(seconds=100), ttl_s=30)
    expired = [Ending(claim_id, "expired", lease_id)]
    with pytest.raises(Overtaken, match="renewed"):
        turns.write(term, Turn(NOW + timedelta(seconds=121), expired=expired))
    assert counts(repository) == (0, 1, 1)
    turns.write(term, Turn(NOW + timedelta(seconds=131), expired=expired))
    assert counts(repository) == (0, 0, 0)


def test_a_paused_leader_cannot_write_after_another_took_over(
    engine: Engine, turns: TurnStore, term: Term
) -> None:
    Leadership(engine, "test", ttl_s=600).resign(term)
    newer = Leadership(engine, "other", ttl_s=600).acquire()
    assert newer is not None and newer.number == term.number + 1
    with pytest.raises(StaleTerm, match="other leads in term 2"):
        turns.write(term, Turn(NOW, claims=[row("c1")]))
    turns.write(newer, Turn(NOW, claims=[row("c1")], rejected=[("c1", "exceeds_fleet", "asked 9")]))
    assert state_of(engine, "c1") == ("rejected", "exceeds_fleet")


def test_endings_of_different_manner_share_a_turn(
    engine: Engine, turns: TurnStore, term: Term, repository: Repository, grant: Give
) -> None:
    ids = [repository.submit(body(f"t{i}"), now=NOW, usable=()) for i in range(4)]
    for claim_id, device in zip(ids[:3], "abc", strict=True):
        grant(claim_id, f"GPU-{device}")
    endings = [
        Ending(ids[0], "released", lease_id_of(ids[0]), "done"),
        Ending(ids[1], "released", lease_id_of(ids[1]), "failed", ("GPU-b",)),
        Ending(ids[2], "task_failed", lease_id_of(ids[2])),
        Ending(ids[3], "cancelled"),
    ]
    turns.write(term, Turn(NOW, endings=endings))
    assert counts(repository) == (0, 0, 0)
    assert [state_of(engine, i) for i in ids] == [
        ("ended", "released"),
        ("ended", "released"),
        ("ended", "task_failed"),
        ("cancelled", "cancelled"),
    ]
    with engine.connect() as connection:
        found = connection.execute(select(lease.c.outcome, lease.c.failed_devices).order_by(lease.c.id)).all()
    assert {(outcome, tuple(failed)) for outcome, failed in found} == {
        ("done", ()),
        ("failed", ("GPU-b",)),
        (None, ()),
    }


def test_a_lease_that_another_replica_ended_does_not_end_again(
    engine: Engine, turns: TurnStore, term: Term, repository: Repository, grant: Give
) -> None:
    claim_id = repository.submit(body(), now=NOW, usable=())
    grant(claim_id, "GPU-a")
    repository.cancel(claim_id, now=NOW, reason="revoked")
    other = repository.submit(body("other"), now=NOW, usable=())
    grant(other, "GPU-a")
    with pytest.raises(Overtaken, match="ended a lease"):
        turns.write(term, Turn(NOW, endings=[Ending(claim_id, "released", lease_id_of(claim_id), "done")]))
    assert counts(repository) == (0, 1, 1), "the device is the other's by now"
    assert state_of(engine, claim_id) == ("ended", "revoked")


@pytest.mark.parametrize("kind", ["ending", "expiry", "renewal", "collection", "resize", "passing on"])
def test_what_was_meant_for_a_try_does_not_reach_the_next_one(
    turns: TurnStore, term: Term, repository: Repository, grant: Give, kind: str
) -> None:
    first = repository.submit(body(), now=NOW, usable=())
    grant(first, "GPU-a")
    lease_id = lease_id_of(first)
    second = repository.submit(body(try_number=2), now=NOW, usable=["GPU-a"])
    later, shape = NOW + timedelta(seconds=300), NewShape(lease_id, {}, 0.25)
    turn = {
        "ending": Turn(NOW, endings=[Ending(first, "released", lease_id)]),
        "expiry": Turn(later, expired=[Ending(first, "expired", lease_id)]),
        "renewal": Turn(NOW, renewed={lease_id: later}),
        "collection": Turn(NOW, collected={lease_id: later}),
        "resize": Turn(NOW, changes=Changes(shapes=[shape])),
        "passing on": Turn(
            NOW,
            claims=[{**row("c3", "train", "granted"), "try_number": 3}],
            passed_on=[PassedOn(lease_id, first, "c3", 2)],
        ),
    }[kind]
    turn.holders = dict.fromkeys(turn.leases(), first)
    before = repository.live_leases()
    with pytest.raises(Overtaken):
        turns.write(term, turn)
    ((held, holder),) = repository.live_leases()
    assert (holder.id, holder.state, tuple(held.row)) == (second, "granted", tuple(before[0][0].row))


def test_renewals_and_collections_are_written(
    engine: Engine, turns: TurnStore, term: Term, repository: Repository, grant: Give
) -> None:
    ids = [repository.submit(body(f"t{i}"), now=NOW, usable=()) for i in range(2)]
    for claim_id, device in zip(ids, "ab", strict=True):
        grant(claim_id, f"GPU-{device}")
    until = NOW + timedelta(seconds=30)
    turn = Turn(NOW, renewed={lease_id_of(ids[0]): until}, collected={lease_id_of(ids[1]): until})
    turns.write(term, turn)
    with engine.connect() as connection:
        found = dict(connection.execute(select(lease.c.id, lease.c.collected_at)).all())
        ends = set(connection.scalars(select(lease.c.expires_at)))
    assert found == {lease_id_of(ids[0]): None, lease_id_of(ids[1]): NOW}
    assert ends == {until}


def test_a_lease_passes_to_the_next_try_under_a_new_epoch(
    engine: Engine, turns: TurnStore, term: Term, repository: Repository, grant: Give
) -> None:
    old = repository.submit(body("t"), now=NOW, usable=())
    grant(old, "GPU-a")
    passed = PassedOn(lease_id_of(old), old, "c2", 2)
    new = {**row("c2", "t", "granted"), "try_number": 2}
    turns.write(term, Turn(NOW, claims=[new], passed_on=[passed]))
    ((held, claim_row),) = repository.live_leases()
    assert (held.row.id, held.row.epoch, claim_row.id, held.devices) == (passed.lease_id, 2, "c2", ("GPU-a",))
    assert state_of(engine, old) == ("ended", "superseded")


def test_what_other_replicas_wrote_is_told_once_and_in_order(
    engine: Engine, turns: TurnStore, term: Term, repository: Repository
) -> None:
    ids = [repository.submit(body(f"t{i}"), now=NOW, usable=()) for i in range(3)]
    repository.cancel(ids[0], now=NOW)
    Leadership(engine, "test", ttl_s=600).resign(term)
    newer = Leadership(engine, "other", ttl_s=600).acquire()
    assert newer is not None
    with pytest.raises(StaleTerm):
        turns.take_events(term)
    assert turns.take_events(newer) == ids, "a paused leader takes none of them"
    assert turns.take_events(newer) == []


def test_waiting_is_noted_for_claims_that_still_wait(
    engine: Engine, turns: TurnStore, repository: Repository
) -> None:
    waits, gone = (repository.submit(body(f"t{i}"), now=NOW, usable=()) for i in range(2))
    repository.cancel(gone, now=NOW)
    note = {"code": "devices_leased", "text": "1 of 1 leased", "at": 1, "expected": NOW, "since": None}
    turns.note_waiting([{"key": claim_id, **note} for claim_id in (waits, gone)])
    assert state_of(engine, waits) == ("pending", "devices_leased")
    assert state_of(engine, gone) == ("cancelled", "cancelled")


def test_earlier_tries_are_found_by_task(turns: TurnStore, repository: Repository, grant: Give) -> None:
    first = repository.submit(body("t"), now=NOW, usable=())
    grant(first, "GPU-a", "GPU-b")
    released = ReleaseBody(secret="s", epoch=1, outcome="failed", failed_devices=("GPU-b",))
    repository.release(lease_id_of(first), released, now=NOW, device_of=nobody)
    key = ("d", "r", "t", -1)
    assert turns.failed_devices([key, ("d", "r", "other", -1)]) == {key: {"GPU-b"}}
    assert turns.ids_of([(*key, 1), (*key, 2)]) == {(*key, 1): first}


def test_old_history_is_deleted_and_what_lives_is_kept(
    turns: TurnStore, repository: Repository, grant: Give
) -> None:
    old, waits, lives = (repository.submit(body(f"t{i}"), now=NOW, usable=()) for i in range(3))
    for claim_id, device in ((old, "GPU-a"), (lives, "GPU-b")):
        grant(claim_id, device)
    repository.release(lease_id_of(old), ReleaseBody(secret="s", epoch=1), now=NOW, device_of=nobody)
    assert turns.forget_before(NOW) == 0
    assert turns.forget_before(NOW + timedelta(days=1)) == 1
    assert {each.id for each in claims(repository, [old, waits, lives])} == {waits, lives}
    assert counts(repository) == (1, 1, 1)
