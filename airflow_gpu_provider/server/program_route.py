"""A route for programs: identity first, then the body, then the call; every refusal teaches.

Plain ASGI: these routes answer thousands of calls a second, and the layers of a web framework cost more than
the calls themselves. `programs` finds them by their path; the routes for people keep FastAPI, see `ui_api`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import parse_qs

from pydantic import BaseModel, TypeAdapter, ValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from airflow_gpu_provider.exceptions import (
    BrokerUnavailable,
    GpuProviderError,
    IdentityRefused,
    LeaseLost,
    NotResized,
)
from airflow_gpu_provider.server.auth import Identity, Role, identify
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.wire import wrong_fields

log = logging.getLogger(__name__)

#: As long as the report of a hundred thousand devices; every byte is held in memory until the last has come.
_MOST_BYTES = 16 * 2**20
_LONGEST_ID = 36

Body = TypeVar("Body", bound=BaseModel)
Answer = BaseModel | Sequence[BaseModel] | dict[str, bool]


class BodyRefused(GpuProviderError):
    """The body of a request is not what the route takes."""

    default_reason = "invalid_body"


class BodyTooLarge(GpuProviderError):
    """The body of a request is longer than any that makes sense."""

    default_reason = "body_too_large"


class Forbidden(GpuProviderError):
    """The caller is known, and may not do this."""

    default_reason = "forbidden"


_STATUS: tuple[tuple[type[GpuProviderError], int], ...] = (
    (BodyRefused, 422),
    (BodyTooLarge, 413),
    (Forbidden, 403),
    (LeaseLost, 409),
    (NotResized, 412),
    (BrokerUnavailable, 503),
)


@dataclass(frozen=True, slots=True)
class Call:
    """An identified request."""

    scope: Scope
    receive: Receive
    broker: Broker
    identity: Identity

    def path(self, name: str) -> str:
        """Return an id of the path; raise BodyRefused for one that no database can store."""
        part = str(self.scope["path_params"][name])
        if "\0" in part or len(part) > _LONGEST_ID:
            raise BodyRefused(
                f"{name}: has at most {_LONGEST_ID} characters and no NUL; give an id as the broker told it."
            )
        return part

    def word(self, name: str) -> str | None:
        """Return a word of the query, None where it is not given or empty."""
        query: bytes = self.scope["query_string"]
        return parse_qs(query.decode("latin-1")).get(name, [None])[-1] if query else None

    def seconds(self, name: str, *, most: float) -> float:
        """Return a length of time of the query, 0 where it is not given."""
        text = self.word(name) or "0"
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
            return model.model_validate_json(await self._content())
        except ValidationError as error:
            raise BodyRefused(wrong_fields(error)) from None

    async def _content(self) -> bytes:
        parts, length = [], 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            length += len(parts[-1])
            if length > _MOST_BYTES:
                raise BodyTooLarge(
                    f"The body has more than {_MOST_BYTES >> 20} MiB, which no call needs; send less at once."
                )
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)


class Endpoint:
    """A call with those who may make it, as an ASGI application."""

    def __init__(self, call: Callable[[Call], Awaitable[Answer]], roles: Sequence[Role]) -> None:
        self._call = call
        self._roles = (*roles, Role.ADMIN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        broker: Broker = scope["app"].state.broker
        try:
            identity = identify(broker.signing_key, _authorization(scope))
            if identity.role not in self._roles:
                allowed = " or ".join(role.value for role in self._roles)
                raise Forbidden(
                    f"This token's role is {identity.role.value}; this call needs {allowed}.",
                    reason="wrong_role",
                )
            content = _json(await self._call(Call(scope, receive, broker, identity)))
        except ClientDisconnect:
            return  # nobody is left to answer
        except GpuProviderError as error:
            await _refusal(error)(scope, receive, send)
        except SQLAlchemyError as error:
            log.exception("%s %s failed in the database", scope["method"], scope["path"])
            kind = error.__class__.__name__
            down = BrokerUnavailable(f"The broker's database failed: {kind}.", reason="database")
            await _refusal(down)(scope, receive, send)
        else:
            length = str(len(content)).encode()
            headers = [(b"content-length", length), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": content})


def program_route(method: str, path: str, call: Callable[[Call], Awaitable[Answer]], *roles: Role) -> Route:
    """Return a route that lets only these roles (and admins) call."""
    return Route(path, Endpoint(call, roles), methods=[method])


def _authorization(scope: Scope) -> str:
    values: list[bytes] = [value for name, value in scope["headers"] if name == b"authorization"]
    return values[0].decode("latin-1") if values else ""


def _json(answer: Answer) -> bytes:
    if isinstance(answer, BaseModel):
        return answer.__pydantic_serializer__.to_json(answer)
    return _ANY.dump_json(answer)


_ANY: TypeAdapter[object] = TypeAdapter(object)


def _refusal(error: GpuProviderError) -> JSONResponse:
    if isinstance(error, IdentityRefused):
        # A wrong secret of a lease is no wrong token: the caller is known.
        code = 403 if error.reason == "lease_secret" else 401
    else:
        code = next((status for kind, status in _STATUS if isinstance(error, kind)), 400)
    # Of a body that is too long the rest is not read.
    headers = {401: {"WWW-Authenticate": "Bearer"}, 413: {"Connection": "close"}}.get(code)
    detail = {"detail": {"reason": error.reason, "message": error.message}}
    return JSONResponse(detail, code, headers=headers)
