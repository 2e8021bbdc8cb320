"""Routes for tasks and triggers: claims and leases."""

from __future__ import annotations

import asyncio
import time

from starlette.concurrency import run_in_threadpool

from airflow_gpu_provider.server import views
from airflow_gpu_provider.server.auth import Role
from airflow_gpu_provider.server.board import Entry
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.program_route import Answer, Call, program_route
from airflow_gpu_provider.server.watches import Watch
from airflow_gpu_provider.wire import (
    ClaimBody,
    ClaimState,
    ClaimView,
    ReleaseBody,
    RenewAnswer,
    RenewBody,
    WaitAnswer,
    WaitBody,
)

_LOOK_AGAIN_S = 0.25  # where another replica decides, its bell does not ring here
_RELOOK_S = 1.0
_LONGEST_WAIT_S = 30.0


async def submit(call: Call) -> ClaimView:
    """Ask for devices; answer at once, or within `wait_s` when that is enough to get them."""
    broker, wait_s = call.broker, call.seconds("wait_s", most=_LONGEST_WAIT_S)
    entry = await broker.submit(await call.body(ClaimBody), is_attended=wait_s > 0)
    try:
        if wait_s > 0 and entry.state is ClaimState.PENDING:
            watch = broker.watches.begin(None)
            try:
                await _until_ready(broker, watch, (entry.claim_id,), wait_s)
            finally:
                broker.watches.end(watch)
    finally:
        broker.desk.attended.discard(entry.claim_id)
    # Not before the claim is unattended: a grant of this moment must not count as collected by nobody.
    if wait_s > 0 or entry.state is ClaimState.GRANTED:
        entry = await broker.collect(entry.claim_id)
    return views.claim_view(broker, entry, with_lease=True)


async def collect(call: Call) -> ClaimView:
    """Return where a claim stands; a granted one comes with its lease, whose TTL starts now."""
    entry = await call.broker.collect(call.path("claim_id"))
    return views.claim_view(call.broker, entry, with_lease=True)


async def wait(call: Call) -> WaitAnswer:
    """Answer as soon as one of the claims is no longer pending, near its turn, or not known at all."""
    broker, body = call.broker, await call.body(WaitBody)
    watch = broker.watches.find(body.watch) if body.watch else broker.watches.begin(body.near_s)
    if watch is None:
        return WaitAnswer(watch=None)
    broker.watches.drop(watch, body.drop)
    unknown = await _until_ready(broker, watch, body.claim_ids, body.timeout_s)
    ready = [await broker.find(claim_id) for claim_id in sorted(watch.ready)]
    if unknown:
        broker.watches.drop(watch, unknown)
    return WaitAnswer(
        watch=watch.name,
        ready=[views.claim_view(broker, entry, with_lease=False) for entry in ready],
        unknown=sorted(unknown),
    )


async def cancel(call: Call) -> dict[str, bool]:
    """Withdraw a claim; the lease of a granted one ends. May be repeated."""
    return {"cancelled": await call.broker.cancel(call.path("claim_id"))}


async def renew(call: Call) -> RenewAnswer:
    """Keep a lease for another TTL."""
    return await call.broker.renew(call.path("lease_id"), await call.body(RenewBody))


async def release(call: Call) -> dict[str, bool]:
    """Give a lease back. May be repeated."""
    return {"released": await call.broker.release(call.path("lease_id"), await call.body(ReleaseBody))}


async def _status(call: Call) -> Answer:
    return await run_in_threadpool(views.status, call.broker)


async def _nodes(call: Call) -> Answer:
    return await run_in_threadpool(views.nodes, call.broker)


async def _queue(call: Call) -> Answer:
    return await run_in_threadpool(views.queue, call.broker)


async def _leases(call: Call) -> Answer:
    return await run_in_threadpool(views.leases, call.broker)


async def _until_ready(broker: Broker, watch: Watch, added: tuple[str, ...], timeout_s: float) -> set[str]:
    """Wait for a watch's claims and the added ones; return those that nobody knows."""
    broker.watches.add(watch, added)
    unknown = await _look(broker, watch, added)
    deadline = time.monotonic() + timeout_s
    while not watch.ready and not unknown and (left_s := deadline - time.monotonic()) > 0:
        if broker.desk.is_open:
            await watch.wait(min(left_s, _RELOOK_S))
            # What is near its turn by now, or was decided while the board was loaded, does not ring.
            _relook(broker, watch)
        else:
            await asyncio.sleep(min(left_s, _LOOK_AGAIN_S))
            unknown = await _look(broker, watch, tuple(watch.claim_ids))
    return unknown


async def _look(broker: Broker, watch: Watch, claim_ids: tuple[str, ...]) -> set[str]:
    """Note which claims need no more waiting, since they were decided before they were watched."""
    board, elsewhere = broker.desk.board, []
    for claim_id in claim_ids:
        entry = board.find(claim_id) if broker.desk.is_open else None
        if entry is None:
            elsewhere.append(claim_id)
        elif _is_ready(broker, entry, watch):
            watch.ready.add(claim_id)
    if not elsewhere:
        return set()
    found = await run_in_threadpool(broker.stored.of, elsewhere)
    watch.ready.update(entry.claim_id for entry in found if _is_ready(broker, entry, watch))
    return set(elsewhere) - {entry.claim_id for entry in found}


def _relook(broker: Broker, watch: Watch) -> None:
    find = broker.desk.board.find
    for claim_id in list(watch.claim_ids):
        entry = find(claim_id)
        if entry is not None and _is_ready(broker, entry, watch):
            watch.ready.add(claim_id)


def _is_ready(broker: Broker, entry: Entry, watch: Watch) -> bool:
    if entry.state is not ClaimState.PENDING:
        return True
    if watch.near_s is None or entry.expected_at is None:
        return False
    return (entry.expected_at - broker.clock()).total_seconds() <= watch.near_s


ROUTES = [
    program_route("POST", "/v1/claims", submit, Role.TASK),
    program_route("POST", "/v1/claims/wait", wait, Role.TASK),
    program_route("POST", "/v1/claims/{claim_id}/collect", collect, Role.TASK),
    program_route("POST", "/v1/claims/{claim_id}/cancel", cancel, Role.TASK),
    program_route("POST", "/v1/leases/{lease_id}/renew", renew, Role.TASK),
    program_route("POST", "/v1/leases/{lease_id}/release", release, Role.TASK),
    program_route("GET", "/v1/status", _status, Role.TASK),
    program_route("GET", "/v1/nodes", _nodes, Role.TASK),
    program_route("GET", "/v1/queue", _queue, Role.TASK),
    program_route("GET", "/v1/leases", _leases, Role.TASK),
]
