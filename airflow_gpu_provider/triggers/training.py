"""The trigger that waits for a training to end while its task is deferred.

The training's keeper gives the lease back when the run ends, so the claim tells it: it ended, or waits again
since its devices were taken back. The task then looks at the run's record for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_gpu_provider.exceptions import BrokerUnavailable, GpuProviderError
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.wire import ClaimState, WaitBody

_LOOK_S = 5.0


class TrainingTrigger(BaseTrigger):
    """
    Wait until a claim holds nothing any more.

    :param claim_id: the claim whose lease the training holds
    :param gpu_conn_id: connection of type `gpu`
    """

    def __init__(self, claim_id: str, gpu_conn_id: str) -> None:
        super().__init__()
        self.claim_id = claim_id
        self.gpu_conn_id = gpu_conn_id

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and plain arguments."""
        arguments = {"claim_id": self.claim_id, "gpu_conn_id": self.gpu_conn_id}
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield one event that says why the task resumes."""
        hook = GpuBrokerHook(self.gpu_conn_id)
        try:
            why = await self._wait(hook)
        finally:
            await hook.aclose()
        yield TriggerEvent({"claim_id": self.claim_id, "why": why})

    async def on_kill(self) -> None:
        """End the training when a person ends the deferred task; not on restarts of the triggerer."""
        hook = GpuBrokerHook(self.gpu_conn_id)
        try:
            await hook.acancel(self.claim_id)
        finally:
            await hook.aclose()

    async def _wait(self, hook: GpuBrokerHook) -> str:
        while True:
            why = await self._look(hook)
            if why is not None:
                return why
            await asyncio.sleep(_LOOK_S)

    async def _look(self, hook: GpuBrokerHook) -> str | None:
        try:
            answer = await hook.wait_any(WaitBody(claim_ids=(self.claim_id,), timeout_s=0.0, near_s=None))
        except BrokerUnavailable as error:
            self.log.warning("%s The training goes on; looking on.", error)
            return None
        except GpuProviderError as error:
            return error.reason  # the task asks again and raises it where its log shows it
        if answer.unknown:
            return "unknown_claim"
        state = answer.ready[0].state if answer.ready else ClaimState.PENDING
        return None if state is ClaimState.GRANTED else state.value
