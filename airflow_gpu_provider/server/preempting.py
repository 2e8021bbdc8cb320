"""What becomes of leases that the engine takes back: marked, spared, and their claims waiting again.

Whose lease is taken back hears of it with its next renewal. It ends when its holder releases it as preempted,
or when its time is over; the claim then waits again under the same id, so that no retry of its task is used.
The next step is `store.preemptions`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from airflow_gpu_provider.broker.model import ClaimId, Decisions, DeviceId, Lease, LeaseId, Preemption
from airflow_gpu_provider.broker.preemption import after_preemption
from airflow_gpu_provider.server.board import Entry
from airflow_gpu_provider.server.held import HeldDevices, TakenFor
from airflow_gpu_provider.store.preemptions import TakenBack, WaitsAgain
from airflow_gpu_provider.store.repository import Repository
from airflow_gpu_provider.wire import RenewAnswer, RequestBody

if TYPE_CHECKING:
    from airflow_gpu_provider.server.desk import Desk
    from airflow_gpu_provider.server.draft import Draft

log = logging.getLogger(__name__)

#: How long after the end of its grace an ended lease may still be kept for the claim that it ended for.
_KEPT = timedelta(seconds=60)
_NOTED = timedelta(seconds=2)


def take_back(decisions: Decisions, desk: Desk, draft: Draft) -> None:
    """Mark the leases that have to end for others, and unmark those that no longer have to."""
    for found in decisions.preemptions:
        for lease_id in found.victims:
            _take(found, lease_id, desk, draft)
    for lease_id in decisions.spared:
        draft.turn.preemptions.spared.append(lease_id)
        draft.then.append(lambda lease_id=lease_id: _mark(desk, lease_id, None))  # type: ignore[misc]


def _take(found: Preemption, lease_id: LeaseId, desk: Desk, draft: Draft) -> None:
    key = desk.entry(found.for_claim, draft).body.key
    why = f"{found.reason}. The claim is of {key.dag_id}.{key.task_id}, run {key.run_id}"
    draft.turn.preemptions.taken.append(TakenBack(lease_id, found.for_claim, found.end_by, why))
    taken = TakenFor(found.for_claim, found.end_by, why)
    draft.then.append(lambda: _mark(desk, lease_id, taken))


def _mark(desk: Desk, lease_id: str, taken: TakenFor | None) -> None:
    # By its lease: a later try of the task may hold it by now.
    entry = desk.board.by_lease.get(lease_id)
    if taken is None:
        log.info("Lease %s need not end any more", lease_id)
    else:
        log.info("Lease %s has to end by %s: %s", lease_id, f"{taken.ends_at:%H:%M:%S} UTC", taken.why)
    if entry is not None and entry.held is not None:
        held = replace(entry.held, taken_back=taken)
        entry.held = replace(held, expires_at=held.until(held.expires_at))


def wait_again(
    entry: Entry,
    held: HeldDevices,
    desk: Desk,
    draft: Draft,
    *,
    outcome: str | None = None,
    failed_devices: tuple[str, ...] = (),
) -> None:
    """End a lease as preempted; its claim waits again once that is written."""
    claim = entry.claim()
    if held.taken_back is not None:  # else it was spared while its holder stopped already
        claim = after_preemption(claim, ClaimId(held.taken_back.claim_id))
    times, by = claim.preemptions, claim.preempted_by
    again = WaitsAgain(held.lease_id, entry.claim_id, times, tuple(by), outcome, failed_devices)
    draft.turn.preemptions.waits_again.append(again)
    for changes in (draft.turn.renewed, draft.turn.collected, draft.turn.preemptions.saved):
        changes.pop(held.lease_id, None)  # its time was over when this was asked
    draft.then.append(lambda: submit_again(entry, times, by, desk))


def submit_again(entry: Entry, times: int, by: frozenset[str], desk: Desk) -> None:
    """Let a claim wait again whose lease has ended."""
    log.info("Claim %s made way for others (%d times so far) and waits again", entry.claim_id, times)
    desk.board.wait_again(entry, times, by)
    assert desk.engine is not None
    desk.engine.submit(entry.claim())


def is_over(held: HeldDevices, now: datetime) -> bool:
    """Return whether a lease ends because it had to, and not because nobody renewed it."""
    return held.taken_back is not None and held.taken_back.ends_at <= now


def renewal(expires_at: datetime, taken: TakenFor | None, now: datetime) -> RenewAnswer:
    """Return what the holder of a renewed lease hears."""
    if taken is None:
        return RenewAnswer(expires_at=expires_at)
    left_s = max(0.0, (taken.ends_at - now).total_seconds())
    return RenewAnswer(expires_at=expires_at, ends_in_s=left_s, reason=taken.why)


def is_news(saved_at: datetime, known: datetime | None) -> bool:
    """Return whether a report of saved work is worth a write: ages are told with some delay."""
    return known is None or saved_at - known > _NOTED


def kept_leases(repository: Repository, entries: list[Entry], grace: timedelta, now: datetime) -> list[Lease]:
    """Return the ended leases whose devices are kept for claims that wait."""
    waits = [entry.claim_id for entry in entries if entry.held is None]
    since = now - grace - _KEPT
    return [
        Lease(
            id=LeaseId(kept.row.id),
            claim_id=ClaimId(kept.row.claim_id),
            devices=tuple(DeviceId(device) for device, _ in kept.devices),
            request=RequestBody.model_validate(kept.row.request or kept.row.asked).to_request(),
            granted_at=kept.row.granted_at,
            expires_at=kept.row.ended_at,
            shares=tuple(milli for _, milli in kept.devices),
            ends_for=ClaimId(kept.row.ends_for),
        )
        for kept in (repository.kept_for(waits, since) if waits else ())
    ]
