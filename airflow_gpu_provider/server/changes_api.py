"""Routes for the holder of a lease that becomes more, less, or moves. The next step is `changes`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from starlette.concurrency import run_in_threadpool

from airflow_gpu_provider.resizes import MoveBody, ResizeAnswer, ResizeBody
from airflow_gpu_provider.server import views
from airflow_gpu_provider.server.asks import PATIENCE_S
from airflow_gpu_provider.server.auth import Role, check_lease_secret
from airflow_gpu_provider.server.board import Entry
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.changes import AcceptMove, Change, CommitMove, DeclineMove, Resize
from airflow_gpu_provider.server.draft import NotLeading
from airflow_gpu_provider.server.other_reports import take_in
from airflow_gpu_provider.server.program_route import Call, program_route


async def resize(call: Call) -> ResizeAnswer:
    """Change a lease at once, or offer it a move. May be repeated."""
    body, lease_id = await call.body(ResizeBody), call.path("lease_id")
    return await answer_change(call.broker, Resize(lease_id, body.epoch, body.to_wish()), body.secret)


async def accept(call: Call) -> ResizeAnswer:
    """Give the holder time to move; both places are its own meanwhile. May be repeated."""
    return await _answer_offer(call, AcceptMove)


async def commit(call: Call) -> ResizeAnswer:
    """Let the lease be in its new place, and free the old one. May be repeated."""
    return await _answer_offer(call, CommitMove)


async def decline(call: Call) -> ResizeAnswer:
    """Let the lease stay, and free the new place. May be repeated."""
    return await _answer_offer(call, DeclineMove)


async def _answer_offer(
    call: Call, kind: type[AcceptMove] | type[CommitMove] | type[DeclineMove]
) -> ResizeAnswer:
    body = await call.body(MoveBody)
    return await answer_change(
        call.broker, kind(call.path("lease_id"), body.epoch, body.offer_id), body.secret
    )


async def answer_change(broker: Broker, request: Change, secret: str) -> ResizeAnswer:
    """Serve a holder's request; return its lease as it is then. Raise NotResized when it stays as it is."""
    check_lease_secret(broker.signing_key, request.lease_id, request.epoch, secret)
    return views.resize_answer(broker, await _ask_leader(broker, request))


async def _ask_leader(broker: Broker, request: Change) -> Entry:
    """Serve a request at this replica's desk, or let the replica that leads do it."""
    try:
        return await asyncio.wrap_future(broker.desk.ask(request, until=time.monotonic() + PATIENCE_S))
    except NotLeading:
        claim_id, wanted_back = await broker.asks.ask(request)
    # The lease may be on a node so new that this replica has not heard of it.
    await run_in_threadpool(lambda: take_in(broker.mirror, broker.nodes))
    entry = await broker.find(claim_id)
    if entry.held is not None:  # no table says it: it is of this moment
        entry = replace(entry, held=replace(entry.held, wanted_back=wanted_back))
    return entry


ROUTES = [
    program_route("POST", "/v1/leases/{lease_id}/resize", resize, Role.TASK),
    program_route("POST", "/v1/leases/{lease_id}/accept", accept, Role.TASK),
    program_route("POST", "/v1/leases/{lease_id}/commit", commit, Role.TASK),
    program_route("POST", "/v1/leases/{lease_id}/decline", decline, Role.TASK),
]
