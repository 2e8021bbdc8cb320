"""Routes for people at the command line: what changes the fleet."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool

from airflow_gpu_provider.rows import DrainRow
from airflow_gpu_provider.server import views
from airflow_gpu_provider.server.auth import Role
from airflow_gpu_provider.server.program_route import Answer, Call, program_route
from airflow_gpu_provider.wire import DrainBody, UndrainBody


async def drain(call: Call) -> DrainRow:
    """Take a node or device out of service; leases that hold it go on."""
    body = await call.body(DrainBody)
    return views.drain_row(await run_in_threadpool(call.broker.drain, body, call.identity.subject))


async def undrain(call: Call) -> dict[str, bool]:
    """Put a node or device back into service. May be repeated."""
    body = await call.body(UndrainBody)
    return {"undrained": await run_in_threadpool(call.broker.undrain, body.target)}


async def _drains(call: Call) -> Answer:
    return [views.drain_row(each) for each in call.broker.drains.in_force()]


ROUTES = [
    program_route("POST", "/v1/drains", drain),
    program_route("POST", "/v1/undrain", undrain),
    program_route("GET", "/v1/drains", _drains, Role.TASK),
]
