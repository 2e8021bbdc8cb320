"""Routes for people, behind Airflow's own login. Reading only; nothing here changes state."""

from __future__ import annotations

from typing import Annotated

from airflow.api_fastapi.auth.managers.models.resource_details import AccessView
from airflow.api_fastapi.core_api.security import requires_access_view
from fastapi import APIRouter, Depends, Request
from starlette.concurrency import run_in_threadpool

from airflow_gpu_provider.rows import LeaseRow, NodeRow, QueueRow, ReservationRow, Status
from airflow_gpu_provider.server import views, wish_views
from airflow_gpu_provider.server.broker import Broker

router = APIRouter(prefix="/ui", dependencies=[Depends(requires_access_view(AccessView.CLUSTER_ACTIVITY))])


def _broker(request: Request) -> Broker:
    broker: Broker = request.app.state.broker
    return broker


BrokerDep = Annotated[Broker, Depends(_broker)]


@router.get("/status")
async def show_status(broker: BrokerDep) -> Status:
    """Return the figures of the whole broker."""
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


@router.get("/reservations")
async def show_reservations(broker: BrokerDep) -> list[ReservationRow]:
    """Return what is reserved ahead, with the devices that are kept."""
    return await run_in_threadpool(wish_views.reservations, broker)
