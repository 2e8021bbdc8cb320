"""The leader's picture of the claims that wait and the leases that live, as the tables have them.

Only turns that are written change it (`desk`), so what it shows was committed. A claim that is decided for
good stays for a while, so that those who wait for it hear of it. Read by other threads one entry at a time;
written by the leader's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from airflow_gpu_provider.broker.model import (
    Claim,
    ClaimId,
    DeviceId,
    Lease,
    LeaseId,
    RunType,
    Waiting,
)
from airflow_gpu_provider.broker.move import Offer, OfferPhase
from airflow_gpu_provider.server.held import HeldDevices, OpenOffer, TakenFor
from airflow_gpu_provider.store.rows import ClaimRow, StoredLease, task_key
from airflow_gpu_provider.wire import ClaimBody, ClaimState, RequestBody, TaskKey

_REMEMBERED = 20_000  # decided claims that are still shown from memory

_MOVED_S = 5.0  # an expected start that moved by less is not worth a write

#: (dag_id, run_id, task_id, map_index)
TaskId = tuple[str, str, str, int]


def task_of(key: TaskKey) -> TaskId:
    """Return the task instance that a try belongs to."""
    return key.dag_id, key.run_id, key.task_id, key.map_index


@dataclass(slots=True)
class Entry:
    """A claim and what it holds."""

    claim_id: str
    body: ClaimBody
    submitted_at: datetime
    excluded: frozenset[str] = frozenset()
    preemptions: int = 0
    preempted_by: frozenset[str] = frozenset()
    state: ClaimState = ClaimState.PENDING
    reason_code: str | None = None
    reason: str | None = None
    position: int | None = None
    expected_at: datetime | None = None
    impossible_since: datetime | None = None
    held: HeldDevices | None = None
    over_since: datetime | None = None  #: its task is over, and its work has yet to stop

    def note(self, waiting: Waiting, expected_at: datetime | None) -> bool:
        """Note where the claim stands; return whether that is worth telling the other replicas."""
        now = waiting.position, waiting.reason.code.value, waiting.reason.text
        same = (self.position, self.reason_code, self.reason) == now
        if same and not _moved(self.expected_at, expected_at):
            return False
        self.position, self.reason_code, self.reason = now
        self.expected_at, self.impossible_since = expected_at, waiting.impossible_since
        return True

    def note_row(self) -> dict[str, object]:
        """Return where the claim stands, for the tables."""
        return {
            "key": self.claim_id,
            "code": self.reason_code,
            "text": self.reason,
            "at": self.position,
            "expected": self.expected_at,
            "since": self.impossible_since,
        }

    def claim(self, *, admitted: bool = False) -> Claim:
        """Return the core's value of the claim; `admitted` when it was let in before."""
        return Claim(
            id=ClaimId(self.claim_id),
            request=self.body.request.to_request(),
            submitted_at=self.submitted_at,
            value=self.body.value,
            run_type=self.body.run_type,
            excluded=frozenset(DeviceId(device) for device in self.excluded),
            team=self.body.team,
            dag_id=self.body.key.dag_id,
            preemptible=self.body.preemptible,
            completes=self.body.completes,
            preemptions=self.preemptions,
            preempted_by=frozenset(ClaimId(claim_id) for claim_id in self.preempted_by),
            admitted=admitted,
            impossible_since=self.impossible_since,
        )

    @property
    def request(self) -> RequestBody:
        """What it holds, or asks for while it waits."""
        return self.body.request if self.held is None else self.held.request or self.body.request

    def lease(self) -> Lease:
        """Return the core's value of the lease that the claim holds."""
        if self.held is None:
            raise ValueError(f"claim {self.claim_id} holds nothing")
        claim, resized, taken = self.claim(), self.held.request, self.held.taken_back
        request = claim.request if resized is None else resized.to_request()
        return Lease(
            id=LeaseId(self.held.lease_id),
            claim_id=claim.id,
            devices=tuple(DeviceId(device) for device in (*self.held.devices, *self.held.spares)),
            request=request,
            granted_at=self.held.granted_at,
            expires_at=self.held.until(self.held.expires_at),
            checkpoint_at=self.held.checkpoint_at,
            ends_for=None if taken is None else ClaimId(taken.claim_id),
            must_end_at=None if taken is None else taken.ends_at,
            # A share may be all of a device, and is written like a whole one then.
            shares=tuple(milli for _, milli in self.held.parts) if request.is_shared else (),
            claim=claim,
        )


@dataclass(slots=True)
class Board:
    """Entries by claim, with the ways to find them."""

    entries: dict[str, Entry] = field(default_factory=dict)
    by_lease: dict[str, Entry] = field(default_factory=dict)
    by_device: dict[str, tuple[Entry, ...]] = field(default_factory=dict)
    by_task: dict[TaskId, list[Entry]] = field(default_factory=dict)
    decided: OrderedDict[str, Entry] = field(default_factory=OrderedDict)
    decided_keys: dict[TaskKey, Entry] = field(default_factory=dict)

    def find(self, claim_id: str) -> Entry | None:
        """Return a claim that waits, holds, or was decided lately."""
        return self.entries.get(claim_id) or self.decided.get(claim_id)

    def add(self, entry: Entry) -> None:
        """Show a claim that waits or holds devices."""
        self.entries[entry.claim_id] = entry
        self.by_task.setdefault(task_of(entry.body.key), []).append(entry)
        if entry.held is not None:
            self.hold(entry, entry.held)

    def hold(self, entry: Entry, held: HeldDevices) -> None:
        """Show that a claim holds devices."""
        entry.held = held
        entry.state = ClaimState.GRANTED
        entry.reason_code = entry.reason = entry.position = entry.expected_at = None
        self.by_lease[held.lease_id] = entry
        for device in held.at_work():
            self.by_device[device] = (*self.by_device.get(device, ()), entry)

    def change(self, entry: Entry, **changes: object) -> None:
        """Show that a live lease became another; one that is over stays so."""
        if entry.held is not None:
            self._leave(entry, entry.held)
            self.hold(entry, replace(entry.held, **changes))  # type: ignore[arg-type]

    def close(self, entry: Entry, state: ClaimState, reason_code: str, reason: str | None = None) -> None:
        """Show that a claim is over, and free what it held."""
        self.entries.pop(entry.claim_id, None)
        of_task = self.by_task.get(task_of(entry.body.key), [])
        if entry in of_task:
            of_task.remove(entry)
            if not of_task:
                del self.by_task[task_of(entry.body.key)]
        self._give_up(entry)
        entry.state, entry.reason_code, entry.reason = state, reason_code, reason
        entry.position = entry.expected_at = None
        self.remember(entry)

    def wait_again(self, entry: Entry, preemptions: int, preempted_by: Iterable[str]) -> None:
        """Show that a claim that was preempted holds nothing and waits again."""
        self._give_up(entry)
        entry.state = ClaimState.PENDING
        entry.preemptions, entry.preempted_by = preemptions, frozenset(preempted_by)

    def remember(self, entry: Entry) -> None:
        """Show a claim that is over to those who still ask for it."""
        self.decided[entry.claim_id] = entry
        self.decided_keys[entry.body.key] = entry
        while len(self.decided) > _REMEMBERED:
            _, oldest = self.decided.popitem(last=False)
            self.decided_keys.pop(oldest.body.key, None)

    def forget(self, entry: Entry) -> None:
        """Show a claim that is over no more."""
        self.decided.pop(entry.claim_id, None)
        if self.decided_keys.get(entry.body.key) is entry:
            del self.decided_keys[entry.body.key]

    def pass_on(self, old: Entry, new: Entry) -> None:
        """Give what one claim holds to another, under a new epoch."""
        held = old.held
        if held is None:
            raise ValueError(f"claim {old.claim_id} holds nothing to pass on")
        self.close(old, ClaimState.ENDED, "superseded")
        self.hold(new, replace(held, epoch=held.epoch + 1, collected=False, offer=None))

    def _give_up(self, entry: Entry) -> None:
        """Show that a claim holds nothing any more."""
        if entry.held is not None:
            self.by_lease.pop(entry.held.lease_id, None)
            self._leave(entry, entry.held)
            entry.held = None

    def _leave(self, entry: Entry, held: HeldDevices) -> None:
        for device in held.at_work():
            left = tuple(each for each in self.by_device.get(device, ()) if each is not entry)
            if left:
                self.by_device[device] = left
            else:
                self.by_device.pop(device, None)


def _moved(old: datetime | None, new: datetime | None) -> bool:
    if old is None or new is None:
        return old is not new
    return abs((new - old).total_seconds()) > _MOVED_S


def entry_of(row: ClaimRow, held: StoredLease | None) -> Entry:
    """Return the entry of a claim as the tables have it."""
    entry = Entry(
        claim_id=row.id,
        body=ClaimBody(
            key=task_key(row),
            request=RequestBody.model_validate(row.request),
            value=row.value,
            run_type=RunType(row.run_type),
            team=row.team,
            preemptible=row.preemptible,
            outlives_worker=row.outlives_worker,
            completes=row.completes,
            ti_id=row.ti_id,
            owner=row.owner,
        ),
        submitted_at=row.submitted_at,
        excluded=frozenset(row.excluded),
        preemptions=row.preemptions,
        preempted_by=frozenset(row.preempted_by),
        impossible_since=row.impossible_since,
        state=ClaimState(row.state),
        reason_code=row.reason_code,
        reason=row.reason,
    )
    if held is not None:
        entry.held = HeldDevices(
            lease_id=held.row.id,
            epoch=held.row.epoch,
            devices=held.devices,
            spares=held.spares,
            nodes=held.nodes,
            match_degree=held.row.match_degree,
            granted_at=held.row.granted_at,
            expires_at=held.row.expires_at,
            collected=held.row.collected_at is not None,
            request=None if held.row.request is None else RequestBody.model_validate(held.row.request),
            moved_by=held.row.moved_by,
            shares=held.shares,
            taken_back=taken_for(held.row),
            checkpoint_at=held.row.checkpoint_at,
        )
        entry.held.offer = _offer_of(held, entry)
    return entry


def taken_for(row: Any) -> TakenFor | None:
    """Return for whom a row of the lease table is being taken back."""
    return None if row.ends_for is None else TakenFor(row.ends_for, row.ends_at, row.ends_why)


def _offer_of(held: StoredLease, entry: Entry) -> OpenOffer | None:
    """Return the offer as the tables have it: from what the lease is, which it cannot leave meanwhile."""
    row = held.offer
    if row is None:
        return None
    lease = entry.lease()
    offer = Offer(
        lease_id=lease.id,
        from_devices=lease.devices,
        from_request=lease.request,
        devices=tuple(DeviceId(device) for device in row.devices),
        request=RequestBody.model_validate(row.request).to_request(),
        expires_at=row.expires_at,
        phase=OfferPhase(row.phase),
        from_shares=lease.shares,
        shares=tuple(row.shares),
    )
    return OpenOffer(row.id, offer)
