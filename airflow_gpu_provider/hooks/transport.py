"""How calls travel to the broker and what its answers mean, the same for both kinds of client.

No answer and 5xx are worth another try; a refusal never is, and becomes the error whose class says what to
do. The client itself is `broker.GpuBrokerHook`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter
from tenacity import retry_if_exception_type, stop_after_delay, wait_random_exponential

from airflow_gpu_provider.exceptions import (
    BrokerUnavailable,
    IdentityRefused,
    InvalidRequest,
    LeaseLost,
    NotResized,
)
from airflow_gpu_provider.wire import API_PREFIX

if TYPE_CHECKING:
    from airflow.sdk import Connection

T = TypeVar("T")

LONG_POLL_S = 20.0


class ServerError(httpx.TransportError):
    """The broker answered 5xx: worth another try, like no answer at all."""


def client_options(
    conn_id: str, connection: Connection, token: str | None, timeout_s: float | None = None
) -> dict[str, Any]:
    """Return what an HTTP client needs to talk to the broker; raise InvalidRequest naming what is missing."""
    host = (connection.host or "").rstrip("/")
    if not host:
        raise InvalidRequest(
            f"Connection {conn_id!r} has no host: set it to the URL of the API server, e.g. "
            "http://localhost:8080.",
            reason="connection_incomplete",
        )
    token = token or connection.password
    if not token:
        raise InvalidRequest(
            f"Connection {conn_id!r} has no password: set it to a token of `airflow gpu token --role task`.",
            reason="connection_incomplete",
        )
    if "://" not in host:
        host = f"{connection.schema or 'http'}://{host}"
    if connection.port:
        host = f"{host}:{connection.port}"
    return {
        "base_url": f"{host}{API_PREFIX}",
        "headers": {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        "timeout": httpx.Timeout(timeout_s or 10.0, read=timeout_s or LONG_POLL_S + 15.0),
        # A token must not travel through a proxy of the environment to a broker on this network.
        "trust_env": False,
    }


def retry_options(patience_s: float) -> dict[str, Any]:
    """Return how often and how long a call that got no answer is repeated."""
    return {
        "retry": retry_if_exception_type(httpx.TransportError),
        "wait": wait_random_exponential(multiplier=0.1, max=2.0),
        "stop": stop_after_delay(patience_s),
        "reraise": True,
    }


def content_of(body: BaseModel | None) -> str:
    """Return the JSON of a body."""
    return "{}" if body is None else body.model_dump_json()


def read(response: httpx.Response, answer: type[T]) -> T:
    """Return what the broker answered; raise the error that a refusal stands for."""
    if response.is_success:
        return TypeAdapter(answer).validate_json(response.content)
    reason, message = _problem(response)
    if response.status_code >= 500:
        raise ServerError(message)
    if response.status_code in (401, 403):
        raise IdentityRefused(message, reason=reason)
    if response.status_code == 409:
        raise LeaseLost(message, reason=reason)
    if response.status_code == 412:
        raise NotResized(message, reason=reason)
    raise InvalidRequest(message, reason=reason)


def _problem(response: httpx.Response) -> tuple[str, str]:
    """Return (reason, sentence) of an answer that is no success."""
    try:
        detail = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        where = f"{response.request.method} {response.request.url}"
        hint = (
            " Is this the URL of an Airflow API server with the GPU provider?"
            if response.is_client_error
            else ""
        )
        return "unexpected_answer", f"{where} answered HTTP {response.status_code}.{hint}"
    if isinstance(detail, dict):
        return str(detail.get("reason", "refused")), str(detail.get("message", detail))
    return "refused", str(detail)


def no_connection(conn_id: str) -> InvalidRequest:
    """Return the error for a connection that is not defined."""
    return InvalidRequest(
        f"Connection {conn_id!r} is not defined: add a connection of type `gpu` with the API server's URL as "
        "host and a token from `airflow gpu token --role task` as password.",
        reason="connection_missing",
    )


def unavailable(conn_id: str, url: object, patience_s: float, error: Exception) -> BrokerUnavailable:
    """Return the error for a broker that does not answer."""
    return BrokerUnavailable(
        f"The GPU broker at {url} (connection {conn_id!r}) did not answer for {patience_s:g} s: "
        f"{error or type(error).__name__}. Check that the API server runs and is reachable from here."
    )
