"""A lease in the hands of a keeper, which lives on when the worker of its task does not.

Two refusals of a renewal do not end it at once. A later try of the task took it over: that try will soon give
the secret of its epoch (`adopt`), and until the time is over the devices are the task's. Or the task is over:
then nobody has the devices before the time is over, and the work may save itself (`ending`). Invariant: once
the lease is lost nothing of the run lives on, whatever the thread that watches it is waiting for.
"""

from __future__ import annotations

import logging

from airflow_gpu_provider.exceptions import LeaseLost
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.launchers.base import TrainingRun
from airflow_gpu_provider.operators.held_lease import HeldLease
from airflow_gpu_provider.resizes import ResizeAnswer
from airflow_gpu_provider.wire import PASSED_ON, TASK_OVER, LeaseView, RequestBody

log = logging.getLogger(__name__)

_AGAIN_S = 0.5
#: for an answer to all but a release: who keeps a run must not wait long, and asks again
_ANSWER_S = 3.0


class KeptLease(HeldLease):
    """Devices of a run that outlives the worker of its task."""

    #: what it was changed to; None = it is as it was asked for
    request: RequestBody | None = None

    def __init__(self, view: LeaseView, hook: GpuBrokerHook) -> None:
        super().__init__(view, hook.answered_within(_ANSWER_S))
        self._patient = hook
        self._run: TrainingRun | None = None

    def works_for(self, run: TrainingRun) -> None:
        """Kill this run as soon as the lease is lost."""
        self._run = run

    def fit(self, least: int, most: int) -> int:
        """Have as many devices as are idle, up to ``most``.

        Return how many of the last ones, beyond the ``least``, would let others start, who wait.
        """
        return self._resize(gpus=max(most, len(self.devices)), least=least).wanted_back

    def _become(self, answer: ResizeAnswer) -> ResizeAnswer:
        self.request = answer.request
        return super()._become(answer)

    def adopt(self, view: LeaseView, hook: GpuBrokerHook) -> None:
        """Hold it for a later try of the same task from now on."""
        self.hook, self._patient = hook.answered_within(_ANSWER_S), hook
        self._renewals, self.view = hook.for_renewals(view.ttl_s), view

    def release(self, outcome: str) -> None:
        """Give the devices back; this is worth waiting for."""
        self.hook = self._patient
        super().release(outcome)

    def _interrupt(self) -> None:
        if self._run is not None:
            self._run.kill()  # the thread that watches it may be in a call; it sees the rest by itself

    def _end_with_parent(self, *, really: bool) -> None:
        """Live on: the parent is the task, and the broker knows whether that is over."""

    def _first_pause_s(self) -> float:
        return 0.0  # some of its time went by while this process started

    def _pause_after(self, refusal: LeaseLost) -> float | None:
        if refusal.reason == PASSED_ON:
            log.info("%s Waiting for its word.", refusal.message)
            return _AGAIN_S
        if refusal.reason == TASK_OVER and not self.ending.is_set():
            self._time.over(refusal)
        # Then there is nothing to renew: the work stops in the time that is left.
        return self.view.ttl_s if refusal.reason == TASK_OVER else None
