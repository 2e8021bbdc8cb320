"""A placement becomes a lease: what is written of it, and what the board and the engine know once it is.

A claim whose asker waits on an open connection collects its lease at once; any other has `collect_within_s`
to come for it. The next step is `store.turns`.
"""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from airflow_gpu_provider.broker.model import Placement
from airflow_gpu_provider.server.board import Entry
from airflow_gpu_provider.server.draft import Draft
from airflow_gpu_provider.server.held import HeldDevices
from airflow_gpu_provider.store.changes import places_of
from airflow_gpu_provider.store.turns import Grant
from airflow_gpu_provider.wire import ClaimState

if TYPE_CHECKING:
    from airflow_gpu_provider.server.desk import Desk


def grant(placement: Placement, desk: Desk, draft: Draft) -> None:
    """Let a turn write that a claim is granted these devices."""
    entry, is_attended = desk.entry(placement.claim_id, draft), placement.claim_id in desk.attended
    held = _held(placement, desk, draft, is_attended=is_attended)
    places = places_of(held.parts, len(held.devices), desk.node_of)
    draft.turn.grants.append(
        Grant(
            lease_id=held.lease_id,
            claim_id=placement.claim_id,
            match_degree=placement.match_degree,
            expires_at=held.expires_at,
            collected_at=draft.turn.now if is_attended else None,
            devices=tuple(place.row(held.lease_id) for place in places.values()),
        )
    )
    for row in draft.turn.claims:
        if row["id"] == placement.claim_id:
            row["state"] = ClaimState.GRANTED.value
    draft.then.append(lambda: _hold(entry, held, placement, desk))


def _held(placement: Placement, desk: Desk, draft: Draft, *, is_attended: bool) -> HeldDevices:
    settings, node_of = desk.settings, desk.node_of
    lives_s = settings.lease_ttl_s if is_attended else settings.collect_within_s
    return HeldDevices(
        lease_id=str(uuid.uuid4()),
        epoch=1,
        devices=placement.devices,
        spares=placement.spares,
        nodes=tuple(sorted({node_of[d] for d in (*placement.devices, *placement.spares)})),
        match_degree=placement.match_degree,
        granted_at=draft.turn.now,
        expires_at=draft.turn.now + timedelta(seconds=lives_s),
        collected=is_attended,
        shares=placement.shares,
    )


def _hold(entry: Entry, held: HeldDevices, placement: Placement, desk: Desk) -> None:
    desk.board.hold(entry, held)
    if desk.engine is not None:
        desk.engine.granted(placement, entry.lease())
    desk.tell(entry.claim_id)
