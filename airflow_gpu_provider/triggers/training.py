"""The trigger that waits for a training to end while its task is deferred.

The training's keeper gives the lease back when the run ends, so the claim tells it: it ended, or waits again
since its devices were taken back. The task then looks at the run's record for itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_gpu_provider.exceptions import BrokerUnavailable, GpuProviderError
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.inventory.host import local_host
from airflow_gpu_provider.training.process_identity import started_at
from airflow_gpu_provider.wire import ClaimState, WaitBody

_LOOK_S = 5.0


class TrainingTrigger(BaseTrigger):
    """
    Wait until a claim holds nothing any more.

    :param claim_id: the claim whose lease the training holds
    :param gpu_conn_id: connection of type `gpu`
    :param keeper: host, process id and start of the run's keeper, for a person's end of the task
    """

    def __init__(self, claim_id: str, gpu_conn_id: str, keeper: Sequence[str] = ()) -> None:
        super().__init__()
        self.claim_id = claim_id
        self.gpu_conn_id = gpu_conn_id
        self.keeper = tuple(keeper)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and plain arguments."""
        arguments: dict[str, Any] = {"claim_id": self.claim_id, "gpu_conn_id": self.gpu_conn_id}
        arguments["keeper"] = list(self.keeper)
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
        """End the training when a person ends the deferred task; not on restarts of the triggerer.

        A keeper on this host saves first and then gives its lease back. One elsewhere loses it.
        """
        if self._stop_keeper_here():
            self.log.info("The task was ended from outside: its training saves and stops.")
            return
        hook = GpuBrokerHook(self.gpu_conn_id)
        try:
            await hook.acancel(self.claim_id)
        finally:
            await hook.aclose()

    def _stop_keeper_here(self) -> bool:
        if not self.keeper or self.keeper[0] != local_host():
            return False
        pid, started = int(self.keeper[1]), self.keeper[2]
        if started_at(pid) != started:
            return False
        try:
            os.kill(pid, signal.SIGTERM)
        except (ProcessLookupError, PermissionError) as error:
            self.log.warning("The keeper of the training cannot be told to stop: %s", error)
            return False
        return True

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
