"""The broker's client for tasks, triggers and the command line.

Every call can be repeated, so a call that got no answer is tried again until `patience_s` is over; then it
raises BrokerUnavailable, which Airflow may retry. A refusal is raised at once and says what to change.
Only HTTP: neither tasks nor triggers may touch a database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlencode

import httpx
from airflow.sdk import BaseHook
from pydantic import BaseModel
from tenacity import AsyncRetrying, Retrying

from airflow_gpu_provider.exceptions import GpuProviderError, InvalidRequest
from airflow_gpu_provider.hooks.transport import (
    LONG_POLL_S,
    client_options,
    content_of,
    no_connection,
    read,
    retry_options,
    unanswered,
)
from airflow_gpu_provider.resizes import MoveBody, ResizeAnswer, ResizeBody
from airflow_gpu_provider.rows import (
    DrainRow,
    LeaseRow,
    NodeRow,
    QueueRow,
    RedundancyRow,
    ReservationRow,
    Status,
    ThroughputRow,
)
from airflow_gpu_provider.wire import (
    ClaimBody,
    ClaimView,
    ReleaseBody,
    RenewAnswer,
    RenewBody,
    WaitAnswer,
    WaitBody,
)
from airflow_gpu_provider.wishes import DrainBody, ReservationBody, UndrainBody, UnreserveBody

if TYPE_CHECKING:
    from airflow.sdk import Connection

T = TypeVar("T")

DEFAULT_CONN_ID = "gpu_default"


class GpuBrokerHook(BaseHook):
    """
    Talk to the GPU broker.

    The connection's host is the URL of the API server (or of `airflow gpu broker`), its password a broker
    token from ``airflow gpu token --role task``.

    :param gpu_conn_id: connection of type `gpu`
    :param patience_s: how long a call is repeated while the broker does not answer, seconds
    :param token: broker token to use instead of the connection's
    :param timeout_s: longest time for one answer, seconds; None: long enough for a long-poll
    :param connection: the connection itself, for a process that cannot ask Airflow for it
    """

    conn_name_attr = "gpu_conn_id"
    default_conn_name = DEFAULT_CONN_ID
    conn_type = "gpu"
    hook_name = "GPU broker"

    def __init__(
        self,
        gpu_conn_id: str = DEFAULT_CONN_ID,
        *,
        patience_s: float = 20.0,
        token: str | None = None,
        timeout_s: float | None = None,
        connection: Connection | None = None,
    ) -> None:
        super().__init__()
        self._given = connection
        self._token = token
        self._timeout_s = timeout_s
        self.gpu_conn_id = gpu_conn_id
        self.patience_s = patience_s
        self._client: httpx.Client | None = None
        self._async_client: httpx.AsyncClient | None = None

    # -- claims and leases
    def submit(self, body: ClaimBody, *, wait_s: float = 0.0) -> ClaimView:
        """Ask for devices; the answer may take `wait_s` when that is enough to get them."""
        return self._post(f"/v1/claims?wait_s={wait_s:g}", body, ClaimView)

    def collect(self, claim_id: str) -> ClaimView:
        """Return where a claim stands, with its lease when it is granted."""
        return self._post(f"/v1/claims/{claim_id}/collect", None, ClaimView)

    def wait(self, claim_id: str, *, timeout_s: float = LONG_POLL_S) -> ClaimView | None:
        """Return the claim as soon as it is no longer pending; None after `timeout_s`."""
        body = WaitBody(claim_ids=(claim_id,), timeout_s=timeout_s, near_s=None)
        answer = self._post("/v1/claims/wait", body, WaitAnswer)
        if answer.unknown:
            raise InvalidRequest(f"The broker knows no claim {claim_id}.", reason="unknown_claim")
        return answer.ready[0] if answer.ready else None

    def cancel(self, claim_id: str) -> None:
        """Withdraw a claim and whatever it holds."""
        self._post(f"/v1/claims/{claim_id}/cancel", None, dict[str, bool])

    def renew(self, lease_id: str, body: RenewBody) -> RenewAnswer:
        """Keep a lease. Raise LeaseLost when it is gone."""
        return self._post(f"/v1/leases/{lease_id}/renew", body, RenewAnswer)

    def release(self, lease_id: str, body: ReleaseBody) -> None:
        """Give a lease back."""
        self._post(f"/v1/leases/{lease_id}/release", body, dict[str, bool])

    def resize(self, lease_id: str, body: ResizeBody) -> ResizeAnswer:
        """Make a lease more or less, at once or by a move that is offered. Raise NotResized."""
        return self._post(f"/v1/leases/{lease_id}/resize", body, ResizeAnswer)

    def accept_move(self, lease_id: str, body: MoveBody) -> ResizeAnswer:
        """Take time to move; both places are the lease's own meanwhile. Raise NotResized."""
        return self._post(f"/v1/leases/{lease_id}/accept", body, ResizeAnswer)

    def commit_move(self, lease_id: str, body: MoveBody) -> ResizeAnswer:
        """Be in the new place and give the old one back. Raise NotResized."""
        return self._post(f"/v1/leases/{lease_id}/commit", body, ResizeAnswer)

    def decline_move(self, lease_id: str, body: MoveBody) -> ResizeAnswer:
        """Stay, and give the new place back."""
        return self._post(f"/v1/leases/{lease_id}/decline", body, ResizeAnswer)

    # -- looking
    def status(self) -> Status:
        """Return the broker's figures."""
        return self._request("GET", "/v1/status", None, Status)

    def nodes(self) -> list[NodeRow]:
        """Return all nodes with their devices."""
        return self._request("GET", "/v1/nodes", None, list[NodeRow])

    def queue(self) -> list[QueueRow]:
        """Return the pending claims, next first."""
        return self._request("GET", "/v1/queue", None, list[QueueRow])

    def leases(self) -> list[LeaseRow]:
        """Return the live leases."""
        return self._request("GET", "/v1/leases", None, list[LeaseRow])

    # -- history
    def throughput(self) -> list[ThroughputRow]:
        """Return how fast each class of tasks was on each model."""
        return self._request("GET", "/v1/throughput", None, list[ThroughputRow])

    def redundancy(
        self, task_class: str | None = None, model: str | None = None, *, host: str | None = None
    ) -> RedundancyRow:
        """Return which share of redundant shards the next training should have, and why."""
        asked = {"task_class": task_class, "model": model, "host": host}
        query = urlencode({name: value for name, value in asked.items() if value})
        return self._request("GET", f"/v1/redundancy?{query}", None, RedundancyRow)

    def redundancies(self) -> list[RedundancyRow]:
        """Return that of the fleet and of every kind of training that is known."""
        return self._request("GET", "/v1/redundancies", None, list[RedundancyRow])

    # -- people
    def drain(self, body: DrainBody) -> DrainRow:
        """Take a node or device out of service; needs an admin's token."""
        return self._post("/v1/drains", body, DrainRow)

    def undrain(self, body: UndrainBody) -> bool:
        """Put a node or device back into service; return False when it was not drained."""
        return self._post("/v1/undrain", body, dict[str, bool])["undrained"]

    def drains(self) -> list[DrainRow]:
        """Return what is drained now."""
        return self._request("GET", "/v1/drains", None, list[DrainRow])

    def reserve(self, body: ReservationBody) -> ReservationRow:
        """Reserve devices ahead; needs an admin's token."""
        return self._post("/v1/reservations", body, ReservationRow)

    def unreserve(self, body: UnreserveBody) -> bool:
        """Take a reservation back; return False when there is none."""
        return self._post("/v1/unreserve", body, dict[str, bool])["unreserved"]

    def reservations(self) -> list[ReservationRow]:
        """Return what is reserved ahead, with the devices that are kept."""
        return self._request("GET", "/v1/reservations", None, list[ReservationRow])

    def test_connection(self) -> tuple[bool, str]:
        """Answer the connection form's Test button."""
        try:
            return True, str(self.status())
        except GpuProviderError as error:
            return False, error.message

    # -- for triggers
    async def wait_any(self, body: WaitBody) -> WaitAnswer:
        """Long-poll for many claims with one request."""
        return await self._apost("/v1/claims/wait", body, WaitAnswer)

    async def acancel(self, claim_id: str) -> None:
        """Withdraw a claim and whatever it holds."""
        await self._apost(f"/v1/claims/{claim_id}/cancel", None, dict[str, bool])

    async def aclose(self) -> None:
        """Close the connections of the asynchronous client."""
        if self._async_client is not None:
            await self._async_client.aclose()
            self._async_client = None

    def for_renewals(self, ttl_s: float) -> GpuBrokerHook:
        """Return a client that gives up early enough to try again within a lease's TTL.

        Its connection is looked up now: only the main thread of a task may ask Airflow for it.
        """
        hook = self.answered_within(ttl_s / 6)
        hook.get_conn()
        return hook

    def answered_within(self, seconds: float) -> GpuBrokerHook:
        """Return a client that gives up when it gets no answer for so long."""
        return GpuBrokerHook(
            self.gpu_conn_id,
            patience_s=seconds,
            token=self._token,
            timeout_s=seconds,
            connection=self.connection(),
        )

    def close(self) -> None:
        """Close the connections of the client."""
        if self._client is not None:
            self._client.close()
            self._client = None

    # -- transport
    def get_conn(self) -> httpx.Client:
        """Return the HTTP client; raise InvalidRequest when the connection is missing or incomplete."""
        if self._client is None:
            self._client = httpx.Client(
                **client_options(self.gpu_conn_id, self.connection(), self._token, self._timeout_s)
            )
        return self._client

    async def _aget_conn(self) -> httpx.AsyncClient:
        if self._async_client is None:
            try:
                connection = await self.aget_connection(self.gpu_conn_id)
            except Exception as error:
                raise no_connection(self.gpu_conn_id) from error
            self._async_client = httpx.AsyncClient(
                **client_options(self.gpu_conn_id, connection, self._token, self._timeout_s)
            )
        return self._async_client

    def connection(self) -> Connection:
        """Return the connection; raise InvalidRequest when it is not defined."""
        if self._given is not None:
            return self._given
        try:
            return self.get_connection(self.gpu_conn_id)
        except Exception as error:
            raise no_connection(self.gpu_conn_id) from error

    def _post(self, path: str, body: BaseModel | None, answer: type[T]) -> T:
        return self._request("POST", path, body, answer)

    def _request(self, method: str, path: str, body: BaseModel | None, answer: type[T]) -> T:
        client = self.get_conn()
        content = content_of(body)
        try:
            for attempt in Retrying(**retry_options(self.patience_s)):
                with attempt:
                    return read(client.request(method, path, content=content), answer)
        except httpx.TransportError as error:
            raise unanswered(self.gpu_conn_id, client.base_url, self.patience_s, error) from None
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _apost(self, path: str, body: BaseModel | None, answer: type[T]) -> T:
        client = await self._aget_conn()
        content = content_of(body)
        try:
            async for attempt in AsyncRetrying(**retry_options(self.patience_s)):
                with attempt:
                    return read(await client.request("POST", path, content=content), answer)
        except httpx.TransportError as error:
            raise unanswered(self.gpu_conn_id, client.base_url, self.patience_s, error) from None
        raise AssertionError("unreachable: the last attempt returns or raises")
