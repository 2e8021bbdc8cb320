"""A route for programs: identity first, then the body, then the call; every refusal teaches.

Plain Starlette: these routes answer thousands of calls a second, and FastAPI's resolution of dependencies
costs more than the calls themselves. The routes for people keep it, see `ui_api`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from airflow_gpu_provider.exceptions import (
    BrokerUnavailable,
    GpuProviderError,
    IdentityRefused,
    LeaseLost,
)
from airflow_gpu_provider.server.auth import Identity, Role, identify
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.wire import wrong_fields

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)
Answer = BaseModel | Sequence[BaseModel] | dict[str, bool]


class BodyRefused(GpuProviderError):
    """The body of a request is not what the route takes."""

    default_reason = "invalid_body"


class Forbidden(GpuProviderError):
    """The caller is known, and may not do this."""

    default_reason = "forbidden"


_STATUS: tuple[tuple[type[GpuProviderError], int], ...] = (
    (BodyRefused, 422),
    (Forbidden, 403),
    (LeaseLost, 409),
    (BrokerUnavailable, 503),
)


@dataclass(frozen=True, slots=True)
class Call:
    """An identified request."""

    request: Request
    broker: Broker
    identity: Identity

    def path(self, name: str) -> str:
        """Return a part of the path."""
        return str(self.request.path_params[name])

    def seconds(self, name: str, *, most: float) -> float:
        """Return a length of time of the query, 0 where it is not given."""
        text = self.request.query_params.get(name, "0")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= most:
            raise BodyRefused(f"{name}={text!r}: allowed are 0 to {most:g} seconds.")
        return value

    async def body(self, model: type[Body]) -> Body:
        """Return the JSON body; raise BodyRefused that names every wrong field."""
        try:
            return model.model_validate_json(await self.request.body())
        except ValidationError as error:
            raise BodyRefused(wrong_fields(error)) from None


def program_route(method: str, path: str, call: Callable[[Call], Awaitable[Answer]], *roles: Role) -> Route:
    """Return a route that lets only these roles (and admins) call."""

    async def endpoint(request: Request) -> Response:
        broker: Broker = request.app.state.broker
        try:
            identity = identify(broker.signing_key, request.headers.get("authorization", ""))
            if identity.role not in (*roles, Role.ADMIN):
                allowed = " or ".join(role.value for role in (*roles, Role.ADMIN))
                raise Forbidden(
                    f"This token's role is {identity.role.value}; this call needs {allowed}.",
                    reason="wrong_role",
                )
            return _answer(await call(Call(request, broker, identity)))
        except GpuProviderError as error:
            return _refusal(error)
        except SQLAlchemyError as error:
            log.exception("%s %s failed in the database", method, path)
            kind = error.__class__.__name__
            return _refusal(BrokerUnavailable(f"The broker's database failed: {kind}.", reason="database"))

    return Route(path, endpoint, methods=[method])


def _answer(answer: Answer) -> Response:
    if isinstance(answer, BaseModel):
        content = answer.__pydantic_serializer__.to_json(answer)
    else:
        content = _ANY.dump_json(answer)
    return Response(content, media_type="application/json")


_ANY: TypeAdapter[object] = TypeAdapter(object)


def _refusal(error: GpuProviderError) -> Response:
    if isinstance(error, IdentityRefused):
        # A wrong secret of a lease is no wrong token: the caller is known.
        code = 403 if error.reason == "lease_secret" else 401
    else:
        code = next((status for kind, status in _STATUS if isinstance(error, kind)), 400)
    headers = {"WWW-Authenticate": "Bearer"} if code == 401 else None
    detail = {"detail": {"reason": error.reason, "message": error.message}}
    return JSONResponse(detail, code, headers=headers)
