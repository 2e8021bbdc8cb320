"""What the leader writes: all that a turn changed, in one fenced transaction.

A turn carries the changes of many requests, so that they share one commit. The leader decided on what it
keeps in memory; other replicas may have written meanwhile. Each statement therefore says what it relies on
and returns what it really changed. What a turn cannot do without (a claim that was to be granted is still
pending) raises `Overtaken`: nothing is written, and the leader looks at the tables again.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, bindparam, delete, insert, select, tuple_, update

from airflow_gpu_provider.broker.model import GpuRequest
from airflow_gpu_provider.store.changes import Changes, change_all
from airflow_gpu_provider.store.endings import Ending, close_claims, end_all, free_devices
from airflow_gpu_provider.store.engine import writing
from airflow_gpu_provider.store.history import FinishedRun, add_runs
from airflow_gpu_provider.store.leadership import IN_TERM, StaleTerm, Term, fence
from airflow_gpu_provider.store.preemptions import Preemptions, write_preemptions
from airflow_gpu_provider.store.script import Script, Scripts, one_of
from airflow_gpu_provider.store.tables import claim, event, lease, lease_device
from airflow_gpu_provider.store.tries import PassedOn, Task, failed_devices, hold_still, pass_on
from airflow_gpu_provider.wire import ClaimState, RequestBody


class Overtaken(Exception):
    """The tables are not what the turn relied on."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease to write; `rows` are its devices."""

    lease_id: str
    claim_id: str
    match_degree: float
    expires_at: datetime
    collected_at: datetime | None
    devices: tuple[dict[str, Any], ...]


@dataclass(slots=True)
class Turn:
    """All changes of one turn. `claims` are rows of the claim table, in their final state of this turn."""

    now: datetime
    forgotten: list[str] = field(default_factory=list)  #: ended claims of other tasks with the same key
    claims: list[dict[str, Any]] = field(default_factory=list)
    passed_on: list[PassedOn] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    runs: list[FinishedRun] = field(default_factory=list)  #: what is to be learned from them
    expired: list[Ending] = field(default_factory=list)
    rejected: list[tuple[str, str, str]] = field(default_factory=list)  #: claim, code, sentence
    grants: list[Grant] = field(default_factory=list)
    renewed: dict[str, datetime] = field(default_factory=dict)
    collected: dict[str, datetime] = field(default_factory=dict)  #: lease, new end of its TTL
    changes: Changes = field(default_factory=Changes)
    preemptions: Preemptions = field(default_factory=Preemptions)
    holders: dict[str, str] = field(default_factory=dict)  #: lease, claim that is thought to hold it

    def leases(self) -> list[str]:
        """Return the leases that are changed for who holds them."""
        expired = [str(each.lease_id) for each in self.expired]
        changed = [*self.renewed, *self.collected, *self.changes.leases(), *self.changes.withdrawn]
        passed_on = {each.lease_id for each in self.passed_on}  # may be taken back in the same turn
        taken = (each for each in self.preemptions.leases() if each not in passed_on)
        return [*expired, *changed, *taken]

    def is_empty(self) -> bool:
        """Return whether there is nothing to write."""
        return (
            self.changes.is_empty()
            and self.preemptions.is_empty()
            and not any(
                (
                    self.claims,
                    self.passed_on,
                    self.endings,
                    self.expired,
                    self.rejected,
                    self.grants,
                    self.renewed,
                    self.collected,
                )
            )
        )


class TurnStore:
    """Writes turns and reads what other replicas wrote."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scripts = Scripts(engine)

    def close(self) -> None:
        """Give the connection back that turns are written on."""
        self._scripts.close()

    def write(self, term: Term, turn: Turn) -> None:
        """Write all of a turn or nothing.

        Raise StaleTerm when another replica leads, Overtaken when the tables differ from what the turn
        relied on, IntegrityError when a device was leased meanwhile.
        """
        stale = StaleTerm(f"term {term.number} of {term.holder} is over")
        try:
            with self._scripts.transaction() as script:
                script.require(IN_TERM, 1, stale, me=term.holder, number=term.number)
                if turn.forgotten:
                    script.run(_FORGET, ids=turn.forgotten)
                _add_claims(script, turn)
                _pass_on(script, turn)
                gone = Overtaken("another replica ended a lease, or passed it on, before it was to end")
                end_all(script, turn.endings, turn.now, gone)
                add_runs(script, turn.runs, Overtaken("another replica kept what a run told"))
                _expire(script, turn)
                ended = Overtaken("a lease was ended by another replica before it was changed")
                change_all(script, turn.changes, turn.now, ended)
                write_preemptions(script, turn.preemptions, turn.now, ended)
                _reject(script, turn)
                _grant(script, turn)
                _extend(script, turn)
                hold_still(script, turn.holders, Overtaken("another replica passed a lease on"))
        except StaleTerm:
            with self._engine.connect() as connection:
                fence(connection, term)  # it says who leads
            raise

    def take_events(self, term: Term) -> list[str]:
        """Return and remove the claims that other replicas changed since the last look.

        Raise StaleTerm when another replica leads by now: the events are for that one.
        """
        with self._engine.connect() as connection:
            if connection.execute(select(event.c.id).limit(1)).first() is None:
                return []
        with writing(self._engine) as connection:
            fence(connection, term)
            # By deletion, not by a last id seen: ids of transactions that commit late would be skipped.
            rows = connection.execute(delete(event).returning(event.c.id, event.c.claim_id)).all()
        return list(dict.fromkeys(str(row.claim_id) for row in sorted(rows)))

    def recent_requests(self, most: int) -> tuple[GpuRequest, ...]:
        """Return what was asked for lately, oldest first."""
        with self._engine.connect() as connection:
            rows = connection.scalars(
                select(claim.c.request).order_by(claim.c.submitted_at.desc()).limit(most)
            ).all()
        return tuple(RequestBody.model_validate(row).to_request() for row in reversed(rows))

    def ids_of(self, keys: Sequence[tuple[str, str, str, int, int]]) -> dict[tuple[Any, ...], str]:
        """Return the claims that exist for these task tries."""
        if not keys:
            return {}
        columns = (claim.c.dag_id, claim.c.run_id, claim.c.task_id, claim.c.map_index, claim.c.try_number)
        with self._engine.connect() as connection:
            rows = connection.execute(select(claim.c.id, *columns).where(tuple_(*columns).in_(list(keys))))
            return {tuple(row[1:]): str(row[0]) for row in rows}

    def failed_devices(self, tasks: Sequence[Task], suspects: Collection[str] = ()) -> dict[Task, set[str]]:
        """Return the devices on which earlier tries of these tasks failed."""
        with self._engine.connect() as connection:
            return failed_devices(connection, tasks, suspects)

    def note_waiting(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write reasons (keys: key, code, text, position, expected_at) of claims that still wait."""
        if not rows:
            return
        with self._scripts.transaction() as script:
            script.run_each(_NOTE, rows)

    def forget_before(self, moment: datetime, *, at_most: int = 10_000) -> int:
        """Delete claims that ended before `moment`, with their leases; return how many."""
        old = select(claim.c.id).where(claim.c.ended_at < moment).limit(at_most)
        with writing(self._engine) as connection:
            return connection.execute(delete(claim).where(claim.c.id.in_(old))).rowcount


def note_event(connection: Connection, claim_id: str) -> None:
    """Let the leader know of a change to a claim or its lease that this transaction makes."""
    connection.execute(insert(event).values(claim_id=claim_id))


def _add_claims(script: Script, turn: Turn) -> None:
    if turn.claims:
        stored = Overtaken("another replica stored a claim of the same task try")
        script.insert_new(claim, turn.claims, stored)


def _pass_on(script: Script, turn: Turn) -> None:
    for passed in turn.passed_on:
        ended = Overtaken(f"lease {passed.lease_id} ended before its task's next try took it over")
        pass_on(script, passed, turn.now, ended)


def _expire(script: Script, turn: Turn) -> None:
    if not turn.expired:
        return
    lease_ids = [str(each.lease_id) for each in turn.expired]
    lives = Overtaken("a lease was renewed or ended by another replica before it expired")
    script.require(_EXPIRE, len(lease_ids), lives, ids=lease_ids, now=turn.now)
    free_devices(script, lease_ids, turn.now)
    close_claims(script, [e.claim_id for e in turn.expired], ClaimState.ENDED, "expired", turn.now)


def _reject(script: Script, turn: Turn) -> None:
    for claim_id, code, text in turn.rejected:
        script.run(_REJECT, key=claim_id, now=turn.now, code=code, text=text)


def _grant(script: Script, turn: Turn) -> None:
    if not turn.grants:
        return
    new = {row["id"] for row in turn.claims}
    waited = [grant.claim_id for grant in turn.grants if grant.claim_id not in new]
    if waited:
        withdrawn = Overtaken("a claim was withdrawn by another replica before it was granted")
        script.require(_GRANT, len(waited), withdrawn, ids=waited)
    rows = [
        {
            "id": grant.lease_id,
            "claim_id": grant.claim_id,
            "epoch": 1,
            "match_degree": grant.match_degree,
            "granted_at": turn.now,
            "collected_at": grant.collected_at,
            "expires_at": grant.expires_at,
        }
        for grant in turn.grants
    ]
    script.insert(lease, rows)
    script.insert(lease_device, [row for grant in turn.grants for row in grant.devices])


def _extend(script: Script, turn: Turn) -> None:
    """Write new ends of leases; few differ, since a turn renews all to the same moment."""
    for statement, ends in ((_RENEW, turn.renewed), (_COLLECT, turn.collected)):
        for moment, group in itertools.groupby(sorted(ends.items(), key=_moment), _moment):
            lease_ids = [lease_id for lease_id, _ in group]
            ended = Overtaken("a lease was ended by another replica before it was renewed")
            values = {"until": moment} | ({"now": turn.now} if statement is _COLLECT else {})
            script.require(statement, len(lease_ids), ended, ids=lease_ids, **values)


def _moment(item: tuple[str, datetime]) -> datetime:
    return item[1]


_FORGET = delete(claim).where(one_of(claim.c.id, "ids"))
_EXPIRE = (
    update(lease)
    .where(one_of(lease.c.id, "ids"), lease.c.ended_at.is_(None), lease.c.expires_at <= bindparam("now"))
    .values(ended_at=bindparam("now"), end_reason="expired")
)
_REJECT = (
    update(claim)
    .where(claim.c.id == bindparam("key"), claim.c.state == ClaimState.PENDING.value)
    .values(
        state=ClaimState.REJECTED.value,
        ended_at=bindparam("now"),
        reason_code=bindparam("code"),
        reason=bindparam("text"),
        position=None,
        expected_at=None,
    )
)
_GRANT = (
    update(claim)
    .where(one_of(claim.c.id, "ids"), claim.c.state == ClaimState.PENDING.value)
    .values(state=ClaimState.GRANTED.value, reason_code=None, reason=None, position=None, expected_at=None)
)
_LIVE = update(lease).where(one_of(lease.c.id, "ids"), lease.c.ended_at.is_(None))
_RENEW = _LIVE.values(expires_at=bindparam("until"))
_COLLECT = _LIVE.values(expires_at=bindparam("until"), collected_at=bindparam("now"))
_NOTE = (
    update(claim)
    .where(claim.c.id == bindparam("key"), claim.c.state == ClaimState.PENDING.value)
    .values(
        reason_code=bindparam("code"),
        reason=bindparam("text"),
        position=bindparam("at"),
        expected_at=bindparam("expected"),
        impossible_since=bindparam("since"),
    )
)
