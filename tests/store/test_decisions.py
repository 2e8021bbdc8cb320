from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.exc import IntegrityError

from airflow_gpu_provider.broker.model import (
    ClaimId,
    Decisions,
    DeviceId,
    LeaseId,
    Reason,
    ReasonCode,
    Rejection,
    Waiting,
)
from airflow_gpu_provider.store.decisions import DecisionStore
from airflow_gpu_provider.store.leadership import Leadership, StaleTerm, Term
from airflow_gpu_provider.store.repository import Repository
from airflow_gpu_provider.store.tables import claim

from .conftest import NOW, body

Grant = Callable[..., None]


def _write(decisions: DecisionStore, term: Term, what: Decisions, seconds: float = 0) -> object:
    return decisions.write(term, what, now=NOW + timedelta(seconds=seconds), collect_within_s=120, node_of={})


def test_the_database_refuses_a_device_in_two_live_leases(repository: Repository, grant: Grant) -> None:
    first = repository.submit(body("one"), now=NOW, usable=())
    second = repository.submit(body("two"), now=NOW, usable=())
    grant(first, "GPU-a", "GPU-b")
    with pytest.raises(IntegrityError):
        grant(second, "GPU-c", "GPU-b")
    assert [row.id for row in repository.pending()] == [second], "nothing of a refused cycle is kept"
    assert repository.counts() == (1, 1, 2)


def test_a_claim_cancelled_meanwhile_gets_no_lease(repository: Repository, grant: Grant) -> None:
    claim_id = repository.submit(body(), now=NOW, usable=())
    repository.cancel(claim_id, now=NOW)
    grant(claim_id, "GPU-a")
    assert repository.counts() == (0, 0, 0)


def test_a_lease_renewed_meanwhile_does_not_expire(
    repository: Repository, decisions: DecisionStore, term: Term, grant: Grant
) -> None:
    claim_id = repository.submit(body(), now=NOW, usable=())
    grant(claim_id, "GPU-a")
    held = repository.lease_of(claim_id, now=NOW, ttl_s=30)
    assert held is not None
    expired = Decisions(expired=(LeaseId(held.row.id),))
    repository.renew(held.row.id, 1, now=NOW + timedelta(seconds=29), ttl_s=30)
    _write(decisions, term, expired, seconds=31)
    assert repository.counts() == (0, 1, 1)
    _write(decisions, term, expired, seconds=60)
    assert repository.counts() == (0, 0, 0)


def test_a_paused_leader_cannot_write_after_another_took_over(
    engine: Engine, repository: Repository, decisions: DecisionStore, term: Term
) -> None:
    claim_id = repository.submit(body(), now=NOW, usable=())
    Leadership(engine, "test", ttl_s=600).resign(term)
    newer = Leadership(engine, "other", ttl_s=600).acquire()
    assert newer is not None and newer.number == term.number + 1
    no = Reason(ReasonCode.EXCEEDS_FLEET, "asked 9, the fleet has 1")
    rejection = Decisions(rejections=(Rejection(ClaimId(claim_id), no),))
    with pytest.raises(StaleTerm, match="other leads in term 2"):
        _write(decisions, term, rejection)
    assert len(repository.pending()) == 1
    _write(decisions, newer, rejection)
    (row,) = repository.claims([claim_id])
    assert (row.state, row.reason_code, row.reason) == ("rejected", "exceeds_fleet", no.text)


def test_waiting_is_written_only_where_it_changed(
    engine: Engine, repository: Repository, decisions: DecisionStore, term: Term
) -> None:
    claim_id = ClaimId(repository.submit(body(), now=NOW, usable=()))

    def note(starts_in_s: float | None, text: str = "1 of 1 leased") -> None:
        reason = Reason(ReasonCode.DEVICES_LEASED, text)
        _write(decisions, term, Decisions(waiting=(Waiting(claim_id, 1, reason, starts_in_s),)))

    def expected() -> object:
        with engine.connect() as connection:
            return connection.scalar(select(claim.c.expected_at).where(claim.c.id == claim_id))

    note(60)
    assert expected() == NOW + timedelta(seconds=60)
    note(62)
    assert expected() == NOW + timedelta(seconds=60), "moved by less than a glance"
    note(90)
    assert expected() == NOW + timedelta(seconds=90)
    note(None)
    assert expected() is None


def test_load_returns_what_the_core_decides_on(
    repository: Repository, decisions: DecisionStore, grant: Grant
) -> None:
    first = repository.submit(body("one", gpus=2), now=NOW, usable=())
    second = repository.submit(body("two", value=7), now=NOW, usable=())
    grant(first, "GPU-b", "GPU-a", spares=("GPU-0",))
    (lease,), (waiting,) = decisions.load()
    assert lease.devices == (DeviceId("GPU-b"), DeviceId("GPU-a"), DeviceId("GPU-0")), "members, then spares"
    assert (lease.claim_id, lease.request.gpus) == (first, 2)
    assert (waiting.id, waiting.value, waiting.submitted_at) == (second, 7, NOW)
