"""How calls travel to the broker and what its answers mean, the same for both kinds of client.

No answer and 5xx are worth another try; a refusal never is, and becomes the error whose class says what to
do. The client itself is `broker.GpuBrokerHook`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError
from tenacity import retry_if_exception, stop_after_delay, wait_random_exponential

from airflow_gpu_provider.broker_address import (
    GIVE_BASE,
    base_url,
    not_found_hint,
    speaks_no_tls,
    usable_token,
)
from airflow_gpu_provider.exceptions import (
    BrokerUnavailable,
    GpuProviderError,
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
    host = (connection.host or "").strip()
    if not host:
        raise InvalidRequest(
            f"Connection {conn_id!r} has no host: set it to the URL of the API server, e.g. "
            "http://localhost:8080.",
            reason="connection_incomplete",
        )
    given = token or connection.password
    token = usable_token(given)
    if token is None:
        wrong = "a password that is no token" if (given or "").strip() else "no password"
        raise InvalidRequest(
            f"Connection {conn_id!r} has {wrong}: set it to a token of `airflow gpu token --role task`, "
            "nothing else beside it.",
            reason="connection_incomplete",
        )
    if "://" not in host:
        host = f"{connection.schema or 'http'}://{host}"
    if connection.port:
        host = f"{host.rstrip('/')}:{connection.port}"
    host = base_url(host, where=f"The host of connection {conn_id!r}")
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
        "retry": retry_if_exception(_may_heal),
        "wait": wait_random_exponential(multiplier=0.1, max=2.0),
        "stop": stop_after_delay(patience_s),
        "reraise": True,
    }


def _may_heal(error: BaseException) -> bool:
    """Return whether the same call may succeed later."""
    hopeless = isinstance(error, httpx.LocalProtocolError | httpx.UnsupportedProtocol)
    return isinstance(error, httpx.TransportError) and not hopeless and not speaks_no_tls(error)


def content_of(body: BaseModel | None) -> str:
    """Return the JSON of a body."""
    return "{}" if body is None else body.model_dump_json()


def read(response: httpx.Response, answer: type[T]) -> T:
    """Return what the broker answered; raise the error that a refusal stands for."""
    if response.is_success:
        try:
            return TypeAdapter(answer).validate_json(response.content)
        except ValidationError as error:
            raise _no_answer(response, error) from None
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


def _no_answer(response: httpx.Response, error: ValidationError) -> BrokerUnavailable:
    """Return the error for a success that is not what a broker of this version answers."""
    first = error.errors(include_input=False)[0]
    hint = (
        f"it is no broker's answer. {GIVE_BASE}"
        if first["type"] == "json_invalid"
        else f"it cannot be read ({'.'.join(map(str, first['loc']))}: {first['msg']}). Task and broker may "
        "have different versions of the provider: update the older one"
    )
    return BrokerUnavailable(f"{_asked(response)} was answered, but {hint}.", reason="unexpected_answer")


def _asked(response: httpx.Response) -> str:
    return f"{response.request.method} {response.request.url}"


def _problem(response: httpx.Response) -> tuple[str, str]:
    """Return (reason, sentence) of an answer that is no success."""
    hint = not_found_hint(response.status_code)
    try:
        detail = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        if response.is_client_error and not hint:
            hint = " Is this the URL of an Airflow API server with the GPU provider?"
        return "unexpected_answer", f"{_asked(response)} answered HTTP {response.status_code}.{hint}"
    if isinstance(detail, dict):
        return str(detail.get("reason", "refused")), str(detail.get("message", detail))
    if hint:  # a web framework's words, not the broker's
        return (
            "unexpected_answer",
            f"{_asked(response)} answered HTTP {response.status_code}: {detail}.{hint}",
        )
    return "refused", str(detail)


def no_connection(conn_id: str) -> InvalidRequest:
    """Return the error for a connection that is not defined."""
    return InvalidRequest(
        f"Connection {conn_id!r} is not defined: add a connection of type `gpu` with the API server's URL as "
        "host and a token from `airflow gpu token --role task` as password.",
        reason="connection_missing",
    )


def unanswered(conn_id: str, url: object, patience_s: float, error: Exception) -> GpuProviderError:
    """Return the error for a call that could not be sent or got no answer."""
    broker = f"The GPU broker at {url} (connection {conn_id!r})"
    if speaks_no_tls(error):
        return InvalidRequest(
            f"{broker} does not speak https at that port: write http:// in the connection's host, or give "
            "the port of https.",
            reason="no_tls",
        )
    if not _may_heal(error):  # its words may show the token
        return InvalidRequest(
            f"{broker} cannot be asked with this connection ({type(error).__name__}): correct its host and "
            "its password.",
            reason="connection_wrong",
        )
    return BrokerUnavailable(
        f"{broker} did not answer for {patience_s:g} s: "
        f"{error or type(error).__name__}. Check that the API server runs and is reachable from here."
    )
