"""What the holder of a lease can ask of the desk about it: more, less, or a move; and what that does.

Served behind the decisions of a turn (`desk`): who waits comes first, and what is given back here is given
out by the next turn. Only the leader can answer, since only its engine knows what is free behind those who
wait. Each request may be repeated: a wish names a state, and a move has an id that the lease keeps.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from airflow_gpu_provider.broker.model import WHOLE_DEVICE, LeaseId
from airflow_gpu_provider.broker.move import Offer, Resized, ResizeRefused
from airflow_gpu_provider.broker.resize import Wish
from airflow_gpu_provider.exceptions import LeaseLost, NotResized
from airflow_gpu_provider.server.board import Entry, task_of
from airflow_gpu_provider.server.held import HeldDevices, OpenOffer
from airflow_gpu_provider.store.changes import NewOffer, NewShape, places_of
from airflow_gpu_provider.wire import PASSED_ON, RequestBody

if TYPE_CHECKING:
    from airflow_gpu_provider.server.desk import Desk
    from airflow_gpu_provider.server.draft import Draft


@dataclass(frozen=True, slots=True)
class Resize:
    """Make a lease more or less."""

    lease_id: str
    epoch: int
    wish: Wish


@dataclass(frozen=True, slots=True)
class AcceptMove:
    """Take time to move to the new place."""

    lease_id: str
    epoch: int
    offer_id: str


@dataclass(frozen=True, slots=True)
class CommitMove:
    """Be in the new place, and give the old one back."""

    lease_id: str
    epoch: int
    offer_id: str


@dataclass(frozen=True, slots=True)
class DeclineMove:
    """Stay, and give the new place back."""

    lease_id: str
    epoch: int
    offer_id: str


Change = Resize | AcceptMove | CommitMove | DeclineMove


def held_entry(lease_id: str, epoch: int, desk: Desk) -> tuple[Entry, HeldDevices]:
    """Return who holds a lease in this epoch; raise LeaseLost when nobody does."""
    entry = desk.board.by_lease.get(lease_id)
    if entry is None or entry.held is None:
        raise LeaseLost(f"Lease {lease_id} has ended, or was never given.", reason="unknown_lease")
    if entry.held.epoch != epoch:
        raise LeaseLost(
            f"Lease {lease_id} is in epoch {entry.held.epoch}; epoch {epoch} is over: a later try holds it.",
            reason=PASSED_ON,
        )
    return entry, entry.held


def change(request: Change, desk: Desk, draft: Draft) -> Entry | None:
    """Let a holder's request change a turn. Raise NotResized when the lease stays as it is."""
    entry, held = held_entry(request.lease_id, request.epoch, desk)
    assert desk.engine is not None
    # What was given back a moment ago is for those who wait, before it is for a lease that grows.
    is_more = isinstance(request, Resize) and request.wish.is_more(entry.lease().request)
    if is_more and not desk.engine.is_settled:
        return None
    if draft.touches(entry.claim_id, task_of(entry.body.key)):
        return None
    if isinstance(request, Resize):
        _resize(request, entry, held, desk, draft)
    elif isinstance(request, AcceptMove):
        _accept(request, entry, held, desk, draft)
    elif isinstance(request, CommitMove):
        _commit(request, entry, held, desk, draft)
    elif held.offer is not None and held.offer.id == request.offer_id:
        desk.engine.resizing.decline(LeaseId(held.lease_id))
        lapse(entry, desk, draft)
    return entry


def lapse(entry: Entry, desk: Desk, draft: Draft) -> None:
    """Note that the offer of a lease is over; the engine knows it."""
    if entry.held is not None:
        draft.turn.changes.withdrawn.append(entry.held.lease_id)
        draft.then.append(lambda: desk.board.change(entry, offer=None))


def _resize(request: Resize, entry: Entry, held: HeldDevices, desk: Desk, draft: Draft) -> None:
    assert desk.engine is not None
    before, lease_id = entry.lease(), LeaseId(held.lease_id)
    if held.taken_back is not None:
        raise NotResized(
            f"This lease ends by {held.taken_back.ends_at:%H:%M:%S} UTC: {held.taken_back.why}. Save the "
            "work; its claim waits again, and may ask for more then.",
            reason="taken_back",
        )
    if request.wish.least is not None:
        return _fit(request, entry, held, desk, draft)
    found = desk.engine.resizing.resize(lease_id, request.wish, draft.turn.now)
    if isinstance(found, Resized):
        if (found.lease.devices, found.lease.request) != (before.devices, before.request):
            _become(found, entry, held, desk, draft)
    elif isinstance(found, Offer):
        if held.offer is None or held.offer.offer != found:
            _offer(found, entry, desk, draft)
    else:
        raise _refusal(found, held)


def _fit(request: Resize, entry: Entry, held: HeldDevices, desk: Desk, draft: Draft) -> None:
    assert desk.engine is not None
    before = entry.lease()
    found = desk.engine.resizing.fit(LeaseId(held.lease_id), request.wish, draft.turn.now)
    if found is None:
        raise _refusal(None, held)
    fitted = found.resized.lease
    if (fitted.devices, fitted.request) != (before.devices, before.request):
        _become(found.resized, entry, held, desk, draft)
    if found.wanted_back != held.wanted_back:
        draft.then.append(lambda: desk.board.change(entry, wanted_back=found.wanted_back))


def _accept(request: AcceptMove, entry: Entry, held: HeldDevices, desk: Desk, draft: Draft) -> None:
    assert desk.engine is not None
    offer = _open_offer(request.offer_id, held)
    found = desk.engine.resizing.accept(LeaseId(held.lease_id), draft.turn.now)
    if not isinstance(found, Offer):
        raise _refusal(found, held)
    if offer.offer.phase is not found.phase:
        draft.turn.changes.accepted[held.lease_id] = found.expires_at
        draft.then.append(lambda: desk.board.change(entry, offer=replace(offer, offer=found)))


def _commit(request: CommitMove, entry: Entry, held: HeldDevices, desk: Desk, draft: Draft) -> None:
    assert desk.engine is not None
    if held.moved_by == request.offer_id:
        return  # committed already; the answer was lost
    offer = _open_offer(request.offer_id, held)
    found = desk.engine.resizing.commit(LeaseId(held.lease_id), draft.turn.now)
    if not isinstance(found, Resized):
        raise _refusal(found, held)
    _become(found, entry, held, desk, draft, moved_by=offer)


def _open_offer(offer_id: str, held: HeldDevices) -> OpenOffer:
    if held.offer is None or held.offer.id != offer_id:
        raise NotResized(
            f"The move {offer_id} of lease {held.lease_id} is not open: it ran out, was declined or never "
            "offered. The old devices are still held: go on there, or ask again.",
            reason="no_offer",
        )
    return held.offer


def _refusal(found: ResizeRefused | None, held: HeldDevices) -> NotResized | LeaseLost:
    if found is None:
        return LeaseLost(f"Lease {held.lease_id} has just ended.", reason="unknown_lease")
    return NotResized(f"Lease {held.lease_id} stays as it is: {found.reason}.")


def _become(
    found: Resized,
    entry: Entry,
    held: HeldDevices,
    desk: Desk,
    draft: Draft,
    *,
    moved_by: OpenOffer | None = None,
) -> None:
    """Note what a lease is from now on."""
    assert desk.engine is not None
    lease, node_of = found.lease, desk.node_of
    now_at = places_of(zip(lease.devices, lease.milli, strict=True), lease.request.gpus, node_of)
    was_at = places_of(held.parts, len(held.devices), node_of)
    arrives = set() if moved_by is None else set(moved_by.arrivals)
    joins = [device for device in now_at if device not in was_at and device not in arrives]
    stays = [d for d in now_at if d in arrives or (d in was_at and was_at[d] != now_at[d])]
    degree = desk.engine.resizing.match_degree(lease)
    request = RequestBody.from_request(lease.request)
    draft.turn.changes.shapes.append(
        NewShape(
            lease_id=held.lease_id,
            request=request.model_dump(mode="json"),
            match_degree=degree,
            leave=found.freed,
            join=tuple(now_at[device] for device in joins),
            stay=tuple(now_at[device] for device in stays),
            moved_by=None if moved_by is None else moved_by.id,
        )
    )
    nodes = {place.node for place in now_at.values() if place.node}
    draft.then.append(
        lambda: desk.board.change(
            entry,
            devices=lease.devices[: lease.request.gpus],
            spares=lease.devices[lease.request.gpus :],
            shares=lease.shares,
            nodes=tuple(sorted(nodes)),
            match_degree=degree,
            request=request,
            offer=None,
            moved_by=held.moved_by if moved_by is None else moved_by.id,
        )
    )


def _offer(found: Offer, entry: Entry, desk: Desk, draft: Draft) -> None:
    """Note that a lease is offered a move, and what is held for it."""
    made = OpenOffer(str(uuid.uuid4()), found)
    shares = found.shares or (WHOLE_DEVICE,) * len(found.devices)
    places = places_of(zip(found.devices, shares, strict=True), found.request.gpus, desk.node_of)
    row = {
        "id": made.id,
        "devices": list(found.devices),
        "request": RequestBody.from_request(found.request).model_dump(mode="json"),
        "shares": list(found.shares),
        "phase": found.phase.value,
        "expires_at": found.expires_at,
    }
    held = tuple(replace(places[device], is_offered=True) for device in made.arrivals)
    draft.turn.changes.offers.append(NewOffer(found.lease_id, row, held))
    draft.then.append(lambda: desk.board.change(entry, offer=made))
