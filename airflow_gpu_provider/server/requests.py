"""What can be asked of the desk, and what each request does to a turn.

`apply` changes the engine at once and notes in the draft what to write and what to show afterwards. It
returns the entry that answers the request, or None when the turn already changes the same claim: such a
request waits for the next turn, where it sees what became of the first.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from airflow_gpu_provider.broker.model import ClaimId, LeaseId
from airflow_gpu_provider.exceptions import InvalidRequest, LeaseLost
from airflow_gpu_provider.server.board import Entry, HeldDevices, task_of
from airflow_gpu_provider.server.changes import (
    Change,
    change,
    held_entry,
)
from airflow_gpu_provider.server.preempting import is_news, submit_again, wait_again
from airflow_gpu_provider.store.endings import Ending
from airflow_gpu_provider.store.history import FinishedRun, finished_run
from airflow_gpu_provider.store.rows import new_claim_row
from airflow_gpu_provider.store.tries import PassedOn, may_pass_on
from airflow_gpu_provider.store.turns import Overtaken
from airflow_gpu_provider.wire import PREEMPTED, TASK_OVER, ClaimBody, ClaimState, ReleaseBody

if TYPE_CHECKING:
    from airflow_gpu_provider.server.desk import Desk
    from airflow_gpu_provider.server.draft import Draft


@dataclass(frozen=True, slots=True)
class Submit:
    """Store a claim. `excluded`: devices on which earlier tries failed."""

    body: ClaimBody
    usable: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    is_attended: bool = False


@dataclass(frozen=True, slots=True)
class Collect:
    """Start the TTL of a granted lease."""

    claim_id: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Withdraw a claim, or end what it holds."""

    claim_id: str
    reason: str = "cancelled"


@dataclass(frozen=True, slots=True)
class Renew:
    """Keep a lease."""

    lease_id: str
    epoch: int
    saved_at: datetime | None = None  #: when its work was last saved


@dataclass(frozen=True, slots=True)
class Release:
    """Give a lease back."""

    lease_id: str
    epoch: int
    outcome: str = "done"
    failed_devices: tuple[str, ...] = ()
    told: ReleaseBody | None = None  #: of what can be learned something


Request = Submit | Collect | Cancel | Renew | Release | Change


def apply(request: Request, desk: Desk, draft: Draft) -> Entry | None:
    """Let a request change a turn. Raise InvalidRequest or LeaseLost when it cannot be served at all."""
    if isinstance(request, Submit):
        return _submit(request, desk, draft)
    if isinstance(request, Cancel):
        return _cancel(request, desk, draft)
    if isinstance(request, Collect):
        return _collect(request, desk, draft)
    if isinstance(request, Change):
        return change(request, desk, draft)
    return _renew_or_release(request, desk, draft)


def _submit(request: Submit, desk: Desk, draft: Draft) -> Entry | None:
    body, key = request.body, request.body.key
    if draft.touches(task_of(key)):
        return None
    tries = desk.board.by_task.get(task_of(key), [])
    for entry in tries:
        if entry.body.key == key:
            return entry
    over = desk.board.decided_keys.get(key)
    if over is not None:
        if not is_another_task(over.body.ti_id, body.ti_id):
            return over
        # A run that was deleted and made again under the same id: the old claim is not this task's.
        draft.turn.forgotten.append(over.claim_id)
        draft.then.append(lambda: desk.board.forget(over))
    entry = Entry(str(uuid.uuid4()), body, draft.turn.now, request.excluded)
    draft.touches(entry.claim_id)
    draft.new[entry.claim_id] = entry
    if request.is_attended:
        desk.attended.add(entry.claim_id)
    draft.turn.claims.append(new_claim_row(entry.claim_id, body, entry.excluded, entry.submitted_at))
    draft.then.append(lambda: desk.board.add(entry))
    assert desk.engine is not None
    if not _supersede(
        entry, [t for t in tries if t.body.key.try_number < key.try_number], request, desk, draft
    ):
        desk.engine.submit(entry.claim())
    return entry


def is_another_task(ti_id: str | None, other: str | None) -> bool:
    """Return whether two task instances of the same name are not the same one."""
    return ti_id is not None and other is not None and ti_id != other


def _supersede(new: Entry, earlier: list[Entry], request: Submit, desk: Desk, draft: Draft) -> bool:
    """End earlier tries of the task; return whether the new one takes over what one of them holds."""
    assert desk.engine is not None
    passed_on = False
    for old in earlier:
        draft.touches(old.claim_id)
        held = old.held
        if held is None:
            draft.turn.endings.append(Ending(old.claim_id, "superseded"))
            desk.engine.withdraw(ClaimId(old.claim_id))
            draft.then.append(lambda old=old: desk.end(old, ClaimState.CANCELLED, "superseded"))  # type: ignore[misc]
            continue
        devices = (*held.devices, *held.spares)
        lives = held.expires_at > draft.turn.now  # else this very turn ends it
        fits = held.taken_back is None and may_pass_on(old.request, devices, new.body.request, request.usable)
        if not passed_on and lives and fits:
            passed_on = True
            draft.turn.passed_on.append(PassedOn(held.lease_id, old.claim_id, new.claim_id, held.epoch + 1))
            draft.turn.claims[-1]["state"] = ClaimState.GRANTED.value
            desk.engine.pass_on(LeaseId(held.lease_id), new.claim())
            draft.then.append(lambda old=old: desk.board.pass_on(old, new))  # type: ignore[misc]
        else:
            draft.turn.endings.append(Ending(old.claim_id, "superseded", held.lease_id))
            desk.engine.end(LeaseId(held.lease_id))
            draft.then.append(lambda old=old: desk.end(old, ClaimState.ENDED, "superseded"))  # type: ignore[misc]
    return passed_on


def _cancel(request: Cancel, desk: Desk, draft: Draft) -> Entry | None:
    entry = desk.board.entries.get(request.claim_id)
    if entry is None:
        return _decided(request.claim_id, desk)
    if draft.touches(entry.claim_id, task_of(entry.body.key)):
        return None
    assert desk.engine is not None
    held = entry.held
    if held is None:
        draft.turn.endings.append(Ending(entry.claim_id, request.reason))
        desk.engine.withdraw(ClaimId(entry.claim_id))
        draft.then.append(lambda: desk.end(entry, ClaimState.CANCELLED, request.reason))
    else:
        draft.turn.endings.append(Ending(entry.claim_id, request.reason, held.lease_id))
        desk.engine.end(LeaseId(held.lease_id))
        draft.then.append(lambda: desk.end(entry, ClaimState.ENDED, request.reason))
    return entry


def _collect(request: Collect, desk: Desk, draft: Draft) -> Entry | None:
    entry = desk.board.entries.get(request.claim_id)
    if entry is None:
        return _decided(request.claim_id, desk)
    held = entry.held
    if held is None or held.collected:
        return entry
    if draft.touches(entry.claim_id):
        return None
    expires_at = held.until(draft.turn.now + timedelta(seconds=desk.settings.lease_ttl_s))
    draft.turn.collected[held.lease_id] = expires_at
    assert desk.engine is not None
    desk.engine.renew(LeaseId(held.lease_id), expires_at)
    draft.then.append(lambda: _replace(entry, expires_at=expires_at, collected=True))
    return entry


def _renew_or_release(request: Renew | Release, desk: Desk, draft: Draft) -> Entry | None:
    entry, held = held_entry(request.lease_id, request.epoch, desk)
    if isinstance(request, Renew) and entry.over_since is not None:
        raise LeaseLost(f"The task of lease {held.lease_id} is over: save and stop.", reason=TASK_OVER)
    if draft.touches(entry.claim_id, task_of(entry.body.key)):
        return None
    assert desk.engine is not None
    if isinstance(request, Renew):
        _renew(request, entry, held, desk, draft)
        return entry
    if request.outcome == PREEMPTED:
        desk.engine.end(LeaseId(held.lease_id))
        given = {"outcome": PREEMPTED, "failed_devices": request.failed_devices}
        wait_again(entry, held, desk, draft, **given)  # type: ignore[arg-type]
        return entry
    draft.turn.endings.append(
        Ending(entry.claim_id, "released", held.lease_id, request.outcome, request.failed_devices)
    )
    if request.told is not None and (run := _finished(entry, held, request.told, desk, draft)) is not None:
        draft.turn.runs.append(run)
    desk.engine.end(LeaseId(held.lease_id))
    draft.then.append(lambda: desk.end(entry, ClaimState.ENDED, "released"))
    return entry


def _renew(request: Renew, entry: Entry, held: HeldDevices, desk: Desk, draft: Draft) -> None:
    assert desk.engine is not None
    expires_at = held.until(draft.turn.now + timedelta(seconds=desk.settings.lease_ttl_s))
    draft.turn.renewed[held.lease_id] = expires_at
    desk.engine.renew(LeaseId(held.lease_id), expires_at)
    changes: dict[str, object] = {"expires_at": expires_at}
    if request.saved_at is not None and is_news(request.saved_at, held.checkpoint_at):
        changes["checkpoint_at"] = draft.turn.preemptions.saved[held.lease_id] = request.saved_at
        desk.engine.note_checkpoint(LeaseId(held.lease_id), request.saved_at)
    draft.then.append(lambda: _replace(entry, **changes))


def _finished(
    entry: Entry, held: HeldDevices, told: ReleaseBody, desk: Desk, draft: Draft
) -> FinishedRun | None:
    return finished_run(
        told,
        lease_id=held.lease_id,
        request=entry.body.request,
        members=held.devices,
        was_changed=held.request is not None or held.moved_by is not None,
        device_of=desk.device_of,
        now=draft.turn.now,
    )


def _replace(entry: Entry, **changes: object) -> None:
    if entry.held is not None:
        entry.held = replace(entry.held, **changes)  # type: ignore[arg-type]


def _decided(claim_id: str, desk: Desk) -> Entry:
    entry = desk.board.decided.get(claim_id)
    if entry is None:
        raise InvalidRequest(f"The broker knows no claim {claim_id}.", reason="unknown_claim")
    return entry


def sync(desk: Desk, fresh: Entry) -> None:
    """Show what another replica wrote of a claim. Raise Overtaken when only a look at all tables can tell."""
    known, engine = desk.board.entries.get(fresh.claim_id), desk.engine
    assert engine is not None
    if known is None:
        if fresh.state.is_terminal:
            desk.board.remember(fresh)
            desk.tell(fresh.claim_id)
        elif fresh.held is None:
            desk.board.add(fresh)
            engine.submit(fresh.claim())
        else:
            raise Overtaken(f"another replica passed a lease on to claim {fresh.claim_id}")
    elif fresh.state.is_terminal:
        if known.held is None:
            engine.withdraw(ClaimId(known.claim_id))
        else:
            engine.end(LeaseId(known.held.lease_id))
        desk.end(known, fresh.state, fresh.reason_code or "ended", fresh.reason)
    elif known.held is not None and fresh.held is not None:
        changed = ("expires_at", "collected", "checkpoint_at")
        _replace(known, **{name: getattr(fresh.held, name) for name in changed})
        engine.renew(LeaseId(known.held.lease_id), fresh.held.expires_at)
        if fresh.held.checkpoint_at is not None:
            engine.note_checkpoint(LeaseId(known.held.lease_id), fresh.held.checkpoint_at)
    elif known.held is not None:  # its holder stopped for others
        engine.end(LeaseId(known.held.lease_id))
        submit_again(known, fresh.preemptions, fresh.preempted_by, desk)
