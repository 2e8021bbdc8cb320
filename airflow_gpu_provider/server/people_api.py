"""Routes for people at the command line: what changes the fleet."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.rows import DrainRow, ReservationRow
from airflow_gpu_provider.server import wish_views
from airflow_gpu_provider.server.auth import Role
from airflow_gpu_provider.server.program_route import Answer, Call, program_route
from airflow_gpu_provider.wishes import DrainBody, ReservationBody, UndrainBody, UnreserveBody


async def drain(call: Call) -> DrainRow:
    """Take a node or device out of service; leases that hold it go on."""
    body = await call.body(DrainBody)
    return wish_views.drain_row(
        await run_in_threadpool(call.broker.drains.drain, body, call.identity.subject)
    )


async def undrain(call: Call) -> dict[str, bool]:
    """Put a node or device back into service. May be repeated."""
    body = await call.body(UndrainBody)
    return {"undrained": await run_in_threadpool(call.broker.drains.undrain, body.target)}


async def _drains(call: Call) -> Answer:
    return [wish_views.drain_row(each) for each in call.broker.drains.in_force()]


async def reserve(call: Call) -> ReservationRow:
    """Reserve devices ahead. May be repeated."""
    body = await call.body(ReservationBody)
    await run_in_threadpool(call.broker.reservations.reserve, body, call.identity.subject)
    found = await run_in_threadpool(wish_views.reservations, call.broker)
    row = next((row for row in found if row.id == body.id), None)
    if row is None:
        raise InvalidRequest(f"Reservation {body.id} was made before and is over.", reason="over")
    return row


async def unreserve(call: Call) -> dict[str, bool]:
    """Take a reservation back. May be repeated."""
    body = await call.body(UnreserveBody)
    return {"unreserved": await run_in_threadpool(call.broker.reservations.unreserve, body.id)}


async def _reservations(call: Call) -> Answer:
    return await run_in_threadpool(wish_views.reservations, call.broker)


ROUTES = [
    program_route("POST", "/v1/drains", drain),
    program_route("POST", "/v1/undrain", undrain),
    program_route("GET", "/v1/drains", _drains, Role.TASK),
    program_route("POST", "/v1/reservations", reserve),
    program_route("POST", "/v1/unreserve", unreserve),
    program_route("GET", "/v1/reservations", _reservations, Role.TASK),
]
