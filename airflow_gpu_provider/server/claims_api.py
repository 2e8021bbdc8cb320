"""Routes for tasks and triggers: claims and leases."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Query, Request, status
from starlette.concurrency import run_in_threadpool

from airflow_gpu_provider.exceptions import GpuProviderError, IdentityRefused, LeaseLost
from airflow_gpu_provider.server import views
from airflow_gpu_provider.server.auth import Role, requires
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.wire import (
    ClaimBody,
    ClaimState,
    ClaimView,
    LeaseRow,
    NodeRow,
    QueueRow,
    ReleaseBody,
    RenewAnswer,
    RenewBody,
    Status,
    WaitAnswer,
    WaitBody,
)

router = APIRouter(prefix="/v1", dependencies=[Depends(requires(Role.TASK))])

_LOOK_AGAIN_S = 0.25  # another replica may have decided: its bell does not ring here


def broker_of(request: Request) -> Broker:
    """Return the broker of this app."""
    broker: Broker = request.app.state.broker
    return broker


BrokerDep = Annotated[Broker, Depends(broker_of)]


@router.post("/claims")
async def submit(
    body: ClaimBody, broker: BrokerDep, wait_s: Annotated[float, Query(ge=0, le=30)] = 0.0
) -> ClaimView:
    """Ask for devices; answer at once, or within `wait_s` when that is enough to decide."""
    claim_id = await run_in_threadpool(broker.submit, body)
    await _until_changed(broker, (claim_id,), wait_s, None)
    return await _one(broker, claim_id)


@router.post("/claims/{claim_id}/collect")
async def collect(claim_id: str, broker: BrokerDep) -> ClaimView:
    """Return where a claim stands; a granted one comes with its lease, whose TTL starts now."""
    return await _one(broker, claim_id)


@router.post("/claims/wait")
async def wait(body: WaitBody, broker: BrokerDep) -> WaitAnswer:
    """Answer as soon as one of the claims is no longer pending, near its turn, or not known at all."""
    return await _until_changed(broker, body.claim_ids, body.timeout_s, body.near_s)


@router.post("/claims/{claim_id}/cancel")
async def cancel(claim_id: str, broker: BrokerDep) -> dict[str, bool]:
    """Withdraw a claim; the lease of a granted one ends. May be repeated."""
    return {"cancelled": await run_in_threadpool(broker.cancel, claim_id)}


@router.post("/leases/{lease_id}/renew")
async def renew(lease_id: str, body: RenewBody, broker: BrokerDep) -> RenewAnswer:
    """Keep a lease for another TTL."""
    try:
        return RenewAnswer(expires_at=await run_in_threadpool(broker.renew, lease_id, body))
    except (IdentityRefused, LeaseLost) as error:
        raise _refused(error) from None


@router.post("/leases/{lease_id}/release")
async def release(lease_id: str, body: ReleaseBody, broker: BrokerDep) -> dict[str, bool]:
    """Give a lease back. May be repeated."""
    try:
        return {"released": await run_in_threadpool(broker.release, lease_id, body)}
    except (IdentityRefused, LeaseLost) as error:
        raise _refused(error) from None


@router.get("/status")
async def show_status(broker: BrokerDep) -> Status:
    """Return the figures that the connection's Test button shows."""
    return await run_in_threadpool(views.status, broker)


@router.get("/nodes")
async def show_nodes(broker: BrokerDep) -> list[NodeRow]:
    """Return all nodes with their devices."""
    return await run_in_threadpool(views.nodes, broker)


@router.get("/queue")
async def show_queue(broker: BrokerDep) -> list[QueueRow]:
    """Return the pending claims, next first."""
    return await run_in_threadpool(views.queue, broker)


@router.get("/leases")
async def show_leases(broker: BrokerDep) -> list[LeaseRow]:
    """Return the live leases."""
    return await run_in_threadpool(views.leases, broker)


async def _one(broker: Broker, claim_id: str) -> ClaimView:
    found = await run_in_threadpool(lambda: broker.views([claim_id], with_lease=True))
    if not found:
        raise HTTPException(
            status.HTTP_404_NOT_FOUND,
            {"reason": "unknown_claim", "message": f"The broker knows no claim {claim_id}."},
        )
    return found[0]


async def _until_changed(
    broker: Broker, claim_ids: tuple[str, ...], timeout_s: float, near_s: float | None
) -> WaitAnswer:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    with broker.wakeup.listen() as bell:
        while True:
            found = await run_in_threadpool(broker.views, claim_ids)
            # Said at once: a claim that does not exist would be waited for until the end of time.
            unknown = sorted(set(claim_ids) - {view.claim_id for view in found})
            ready = [view for view in found if _is_ready(view, near_s)]
            left_s = deadline - loop.time()
            if ready or unknown or left_s <= 0:
                return WaitAnswer(ready=ready, unknown=unknown)
            await bell.wait(min(left_s, _LOOK_AGAIN_S))


def _is_ready(view: ClaimView, near_s: float | None) -> bool:
    if view.state is not ClaimState.PENDING:
        return True
    return near_s is not None and view.starts_in_s is not None and view.starts_in_s <= near_s


def _refused(error: GpuProviderError) -> HTTPException:
    code = status.HTTP_403_FORBIDDEN if isinstance(error, IdentityRefused) else status.HTTP_409_CONFLICT
    return HTTPException(code, {"reason": error.reason, "message": error.message})
