"""The one place where a task gets a lease, holds it and gives it back.

Subclasses say what to do with the devices (`run_leased`); asking, waiting, deferring, renewing and releasing
happen here only. What is asked, and what is refused at parse time, is in `asking`. What this fleet can never
serve fails at once and is not retried; what must wait is deferred.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from airflow.sdk import conf
from pydantic import ValidationError

from airflow_gpu_provider.exceptions import (
    GpuProviderError,
    InvalidRequest,
    LeaseLost,
    QueueTimeout,
    RequestRejected,
)
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.inventory.host import local_host
from airflow_gpu_provider.operators.asking import GpuAskingOperator, seconds_of
from airflow_gpu_provider.operators.held_lease import HeldLease
from airflow_gpu_provider.operators.hopeless import fail_the_hopeless
from airflow_gpu_provider.operators.waiting_log import WaitingLog
from airflow_gpu_provider.retry_policy import GpuRetryPolicy
from airflow_gpu_provider.triggers.lease import LeaseTrigger
from airflow_gpu_provider.wire import ClaimState, ClaimView, wrong_fields

if TYPE_CHECKING:
    from airflow.sdk import Context

_DECIDE_S = 1.0  # a free device is granted within this, which saves a deferral
_POLL_S = 20.0


class GpuLeasedOperator(GpuAskingOperator):
    """
    Hold GPUs while `run_leased` runs.

    The arguments of `GpuAskingOperator`, and:

    Without a `retry_policy` a task has `GpuRetryPolicy()`; `ExceptionRetryPolicy(rules=[])` turns it off.

    :param deferrable: wait in the triggerer instead of a worker slot
    """

    ui_color = "#76b900"

    def __init__(self, *, deferrable: bool | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.retry_policy is None:
            self.retry_policy = GpuRetryPolicy()
        if deferrable is None:
            deferrable = conf.getboolean("operators", "default_deferrable", fallback=False)
        self.deferrable = deferrable
        self._claim_id: str | None = None
        self._held: HeldLease | None = None

    # -- for subclasses
    def run_leased(self, context: Context, lease: HeldLease) -> Any:
        """Do the work on the leased devices; its return value is the task's XCom."""
        raise NotImplementedError(f"{type(self).__name__} must implement run_leased(context, lease)")

    # -- lifecycle
    def execute(self, context: Context) -> Any:
        """Ask for the devices, wait for them, work, give them back."""
        with fail_the_hopeless():
            hook = GpuBrokerHook(self.gpu_conn_id)
            try:
                body = self.claim_body(context)
            except ValidationError as error:
                raise InvalidRequest(wrong_fields(error)) from error
            view = hook.submit(body, wait_s=_DECIDE_S)
            self._claim_id = view.claim_id
            return self._proceed(context, hook, view, self._deadline())

    def resume(self, context: Context, event: dict[str, Any], deadline: str | None = None) -> Any:
        """Go on after the triggerer waited."""
        with fail_the_hopeless():
            self._claim_id = event["claim_id"]
            hook = GpuBrokerHook(self.gpu_conn_id)
            view = hook.collect(event["claim_id"])
            ends_at = None if deadline is None else datetime.fromisoformat(deadline)
            if event["why"] == ClaimState.PENDING.value:
                self.log.info("Claim %s is near its turn: standing by", view.claim_id)
            return self._proceed(context, hook, view, ends_at, standby=True)

    def on_kill(self) -> None:
        """Give everything back when a person ends the task, after the work itself has ended."""
        if self._held is not None:
            # Airflow lets the work run on for seconds after this: it must end before its devices are free.
            raise SystemExit(f"The task was ended from outside; lease {self._held.lease_id} is given back.")
        if self._claim_id is not None:
            GpuBrokerHook(self.gpu_conn_id).cancel(self._claim_id)

    def _proceed(
        self,
        context: Context,
        hook: GpuBrokerHook,
        view: ClaimView,
        deadline: datetime | None,
        *,
        standby: bool = False,
    ) -> Any:
        # A forecast may slip: a worker slot is not held in standby for much longer than was expected.
        standby_until = _now() + timedelta(seconds=2 * self._standby_s() if standby else 0)
        waiting = WaitingLog(self.log)
        while view.state is ClaimState.PENDING:
            waiting.tell(view)
            left_s = _POLL_S if deadline is None else (deadline - _now()).total_seconds()
            if left_s <= 0:
                hook.cancel(view.claim_id)
                raise QueueTimeout(
                    f"No GPUs within queue_timeout={self.queue_timeout}: asked {self.gpus}; position "
                    f"{view.position}, {view.reason}. Raise queue_timeout, ask for less or add nodes."
                )
            standby_s = (standby_until - _now()).total_seconds()
            if self.deferrable and standby_s <= 0:
                self._defer(view.claim_id, deadline)
            wait_s = min(_POLL_S, left_s, standby_s) if self.deferrable else min(_POLL_S, left_s)
            hook.wait(view.claim_id, timeout_s=wait_s)
            view = hook.collect(view.claim_id)
        return self._work(context, hook, view)

    def _work(self, context: Context, hook: GpuBrokerHook, view: ClaimView) -> Any:
        if view.state is ClaimState.REJECTED:
            raise RequestRejected(str(view.reason), reason=view.reason_code)
        if view.lease is None:
            raise LeaseLost(
                f"Claim {view.claim_id} is {view.state.value} ({view.reason_code}): its devices were not "
                "collected in time or were taken back. A retry asks again."
            )
        held = HeldLease(view.lease, hook)
        try:
            return self._hold(context, held)
        except LeaseLost as lost:
            again = self._again(hook, held.claim_id, held.lease_id, lost)
        self._claim_id = again.claim_id
        return self._proceed(context, hook, again, self._deadline())

    def _hold(self, context: Context, held: HeldLease) -> Any:
        with held.working() as lease, self._held_while_working(held):
            self._check_host(lease)
            return self.run_leased(context, lease)

    def _again(self, hook: GpuBrokerHook, claim_id: str, lease_id: str, lost: LeaseLost) -> ClaimView:
        """Return the claim that waits again since its lease was taken back; raise what was lost else."""
        try:
            view = hook.collect(claim_id)
        except GpuProviderError as error:
            raise lost from error
        is_new = view.lease is not None and view.lease.lease_id != lease_id
        if view.state is not ClaimState.PENDING and not is_new:
            raise lost
        self.log.warning("%s The task waits for devices again; its tries are untouched.", lost.message)
        return view

    @contextmanager
    def _held_while_working(self, held: HeldLease) -> Iterator[None]:
        self._held = held
        try:
            yield
        finally:
            self._held = self._claim_id = None

    def _defer(self, claim_id: str, deadline: datetime | None) -> None:
        ends_at = None if deadline is None else deadline.isoformat()
        self.defer(
            trigger=LeaseTrigger(claim_id, self.gpu_conn_id, self._standby_s() or None, ends_at),
            method_name="resume",
            kwargs={"deadline": ends_at},
        )

    def _check_host(self, lease: HeldLease) -> None:
        here = local_host()
        elsewhere = sorted({d.host for d in lease.devices if d.host != here})
        if elsewhere:
            raise LeaseLost(
                f"The task resumed on host {here}, its devices are on {', '.join(elsewhere)}: route the task "
                "to a queue that only this host's workers serve."
            )
        for device in lease.devices:
            self.log.info(
                "Leased %s (%s%s, node %s), match degree %.2f",
                device.id,
                device.model,
                ", simulated" if device.simulated else "",
                device.node,
                lease.match_degree,
            )

    @staticmethod
    def _standby_s() -> float:
        return conf.getfloat("gpu", "standby_s", fallback=10.0)

    def _deadline(self) -> datetime | None:
        seconds = seconds_of(self.queue_timeout)
        return None if seconds is None else _now() + timedelta(seconds=seconds)


def _now() -> datetime:
    return datetime.now(timezone.utc)
