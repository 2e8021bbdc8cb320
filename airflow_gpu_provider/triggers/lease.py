"""The trigger that waits for a claim while its task is deferred.

It only waits: the lease is collected by the task after it resumed, so no secret passes through Airflow's
database. The task resumes when its claim is decided, shortly before its turn (so that a device does not idle
while Airflow brings the task back), or at the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_gpu_provider.exceptions import BrokerUnavailable, GpuProviderError
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.triggers.claim_watch import claim_watch

_AGAIN_S = 5.0


class LeaseTrigger(BaseTrigger):
    """
    Wait until a claim is decided or near its turn.

    :param claim_id: the claim
    :param gpu_conn_id: connection of type `gpu`
    :param near_s: resume this long before the expected start; None: only when decided
    :param deadline: ISO time at which waiting ends, None: never
    """

    def __init__(
        self,
        claim_id: str,
        gpu_conn_id: str,
        near_s: float | None = None,
        deadline: str | None = None,
    ) -> None:
        super().__init__()
        self.claim_id = claim_id
        self.gpu_conn_id = gpu_conn_id
        self.near_s = near_s
        self.deadline = deadline

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and plain arguments."""
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "claim_id": self.claim_id,
                "gpu_conn_id": self.gpu_conn_id,
                "near_s": self.near_s,
                "deadline": self.deadline,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield one event that says why the task resumes; the task then looks for itself."""
        try:
            why = await asyncio.wait_for(self._wait(), self._left_s())
        except asyncio.TimeoutError:
            why = "deadline"
        except GpuProviderError as error:
            why = error.reason  # the task asks again and raises it where its log shows it
        yield TriggerEvent({"claim_id": self.claim_id, "why": why})

    async def on_kill(self) -> None:
        """Withdraw the claim when a person ends the deferred task; not on restarts of the triggerer."""
        hook = GpuBrokerHook(self.gpu_conn_id)
        try:
            await hook.acancel(self.claim_id)
        finally:
            await hook.aclose()

    async def _wait(self) -> str:
        while True:
            try:
                view = await claim_watch(self.gpu_conn_id).wait(self.claim_id, near_s=self.near_s)
                return view.state.value
            except BrokerUnavailable as error:
                # The claim is stored: a broker that restarts decides it all the same.
                self.log.warning("%s Waiting on.", error)
                await asyncio.sleep(_AGAIN_S)

    def _left_s(self) -> float | None:
        if self.deadline is None:
            return None
        left = datetime.fromisoformat(self.deadline) - datetime.now(timezone.utc)
        return max(0.0, left.total_seconds())
