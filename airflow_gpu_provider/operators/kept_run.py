"""A run in the hands of a keeper, as the task sees it: started, found again, gone on with, ended.

The task that starts it is its parent and no more: the run goes on when that is killed. A later try on this
host finds the keeper by what lies in the folder of the attempt. Invariant: what was found is the process
that was meant, not another one of the same number. Next: `keeper`.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from airflow_gpu_provider.exceptions import GpuProviderError, LeaseLost, LeasePreempted, WorkerGroupFailed
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.inventory.host import local_host
from airflow_gpu_provider.launchers.local import LocalLauncher, last_lines
from airflow_gpu_provider.operators.keeper_files import (
    BrokerAddress,
    KeeperEnd,
    Orders,
    Whereabouts,
    leave_orders,
    take_orders,
)
from airflow_gpu_provider.operators.lease_time import renewal_pause_s
from airflow_gpu_provider.operators.program_environment import program_environment
from airflow_gpu_provider.training.parenthood import living_in_group
from airflow_gpu_provider.training.plan import RunPaths, RunPlan
from airflow_gpu_provider.training.process_identity import started_at
from airflow_gpu_provider.training.run_file import RunRecord, read_record, write_json
from airflow_gpu_provider.wire import PASSED_ON, LeaseView, ReleaseBody, RenewBody, RequestBody, TaskKey

log = logging.getLogger(__name__)

_KEEPER = "airflow_gpu_provider.operators.keeper"
#: beyond the plan's grace, for the guard to leave and the keeper to give the lease back
_LEAVE_S = 20.0
_POLL_S = 0.1
#: The broker looks at the states of tasks every second.
_ASK_FOR_S = 3.0


class KeptRun:
    """One run and its keeper."""

    def __init__(
        self, plan: RunPlan, where: Whereabouts, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.plan = plan
        self.paths = RunPaths(plan.run_dir)
        self._where = where
        self._process = process

    @classmethod
    def start(
        cls,
        plan: RunPlan,
        key: TaskKey,
        request: RequestBody,
        lease: LeaseView,
        hook: GpuBrokerHook,
        guarded: int,
    ) -> KeptRun:
        """Start the keeper of a plan, which keeps the file ``guarded`` open.

        Raise InvalidRequest when the run can never start here.
        """
        LocalLauncher().check()
        plan.paths.create()
        write_json(plan.paths.plan, plan.model_dump_json(indent=1))
        with plan.paths.keeper_log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", _KEEPER, str(plan.run_dir), str(guarded)],
                pass_fds=(guarded,),
                env=program_environment(),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        where = Whereabouts(
            host=local_host(),
            pid=process.pid,
            started=started_at(process.pid) or "",
            key=key,
            lease_id=lease.lease_id,
            claim_id=lease.claim_id,
            request=request,
        )
        # Before it gets its orders: a keeper that holds a lease can always be found.
        where.write(plan.paths.keeper)
        assert process.stdin is not None
        orders = Orders(broker=BrokerAddress.of(hook.gpu_conn_id, hook.connection()), lease=lease)
        with process.stdin as orders_to:
            orders_to.write(orders.model_dump_json().encode())
        run = cls(plan, where, process)
        run._renew_until_held(lease, hook)
        return run

    @classmethod
    def find(cls, run_dir: Path, key: TaskKey) -> KeptRun | None:
        """Return the run that a try of this task has left in a folder of this host, None = there is none."""
        paths = RunPaths(run_dir)
        where = Whereabouts.read(paths.keeper)
        any_try = {"try_number": key.try_number}
        if where is None or where.host != local_host() or where.key.model_copy(update=any_try) != key:
            return None
        try:
            plan = RunPlan.model_validate_json(paths.plan.read_text())
        except (OSError, ValueError) as error:
            log.warning("The run in %s is not gone on with, its plan cannot be read: %s", run_dir, error)
            return None
        return cls(plan, where)

    @property
    def where(self) -> Whereabouts:
        """Where the keeper is, and how it ended; the last word that it left."""
        self._where = Whereabouts.read(self.paths.keeper) or self._where
        return self._where

    @property
    def is_alive(self) -> bool:
        """True while its keeper runs."""
        if self._process is not None:
            self._process.poll()
        return self._where.is_alive

    def go_on(self, lease: LeaseView, hook: GpuBrokerHook) -> bool:
        """Let the keeper hold the lease that this try got from an earlier one; False: it has ended."""
        orders = Orders(broker=BrokerAddress.of(hook.gpu_conn_id, hook.connection()), lease=lease)
        leave_orders(self.paths.keeper_orders, orders)
        deadline = time.monotonic() + lease.ttl_s / 3
        while self.is_alive and self.paths.keeper_orders.exists() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self.is_alive or not self.paths.keeper_orders.exists():
            return True
        self.paths.keeper_orders.unlink(missing_ok=True)
        return False

    def take_back_orders(self) -> None:
        """Give a lease back that was left for a keeper which had ended, and leave its secret nowhere."""
        orders = take_orders(self.paths.keeper_orders)
        if orders is None:
            return
        secret, epoch = orders.lease.secret, orders.lease.epoch
        try:
            orders.broker.hook().release(
                orders.lease.lease_id, ReleaseBody(secret=secret, epoch=epoch, failed_devices=())
            )
        except GpuProviderError as error:
            log.warning("Lease %s ends by its TTL: %s", orders.lease.lease_id, error)

    def _renew_until_held(self, lease: LeaseView, hook: GpuBrokerHook) -> None:
        """Keep the lease while its keeper starts, which takes a while where a host has much to do."""
        renewals, body = hook.for_renewals(lease.ttl_s), RenewBody(secret=lease.secret, epoch=lease.epoch)
        renew_at = time.monotonic()
        while self.is_alive and self.where.guard is None:
            if time.monotonic() >= renew_at:
                renew_at = time.monotonic() + renewal_pause_s(lease.ttl_s)
                try:
                    renewals.renew(lease.lease_id, body)
                except LeaseLost:
                    self.kill()
                    raise
                except GpuProviderError as error:
                    log.warning("Lease %s not renewed while its keeper starts: %s", lease.lease_id, error)
            time.sleep(_POLL_S)

    # -- what `ProgressLog` needs of a run
    def record(self) -> RunRecord | None:
        """Return where the run stands, None while it has not said anything."""
        return read_record(self.paths.run)

    def has_ended(self) -> bool:
        """Say whether nothing of the run is left, neither its keeper nor what was below it."""
        return not self.is_alive and not self.where.guard_is_alive

    def shard_log_tail(self, uid: str) -> list[str]:
        """Return the last lines a shard printed."""
        return last_lines(self.paths.log(uid))

    def explain_end(self) -> str:
        """Say how it ended, for a run whose record does not."""
        lines = "\n".join([*last_lines(self.paths.supervisor_log), *last_lines(self.paths.keeper_log)])
        return f"{self.where.why or 'its keeper ended without a word'}; the last lines:\n{lines}"

    def last_record(self, record: RunRecord | None) -> RunRecord:
        """Return the record of a run that has ended; raise why it has none, or how its lease was lost."""
        where = self.where
        if where.end is KeeperEnd.PREEMPTED:
            raise LeasePreempted(where.why)
        if where.end is KeeperEnd.LOST:
            raise LeaseLost(where.why)
        if record is None or not record.state.is_terminal:
            raise WorkerGroupFailed(f"The training broke off: {self.explain_end()}", reason="broke_off")
        return record

    # -- ending it
    def stop(self) -> None:
        """Let the shards save and the keeper give the lease back; return when nothing of them is left."""
        if self.is_alive:
            self._signal(signal.SIGTERM)
        if not self._wait(self.plan.stop_grace_s + _LEAVE_S):
            log.warning("The run did not stop within its grace; it is killed")
            self.kill()

    def kill(self) -> None:
        """End the keeper and everything below it now."""
        if self.is_alive:
            self._signal(signal.SIGKILL)
        guard = self.where.guard
        if guard is not None and self.where.guard_is_alive:
            with suppress(ProcessLookupError):
                os.killpg(guard, signal.SIGKILL)
        if not self._wait(_LEAVE_S):
            log.error("Processes of the run in %s were killed and have not ended", self.plan.run_dir)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._where.pid, number)

    def _wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self.has_ended() or ((guard := self.where.guard) and living_in_group(guard)):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def is_task_over(lease: LeaseView, hook: GpuBrokerHook) -> bool:
    """Ask the broker, which knows the states of tasks; False also when it does not tell soon.

    Airflow ends a task alike when a person marks it and when its worker is stopped. Only the first ends the
    training; where that is not told now, the broker ends it through its keeper.
    """
    body = RenewBody(secret=lease.secret, epoch=lease.epoch)
    deadline = time.monotonic() + _ASK_FOR_S
    while time.monotonic() < deadline:
        try:
            hook.renew(lease.lease_id, body)
        except LeaseLost as lost:
            return lost.reason != PASSED_ON  # else a later try of the task has it, and trains on
        except GpuProviderError as error:
            log.warning("Whether the task is over is not known: %s", error.message)
            return False
        time.sleep(_POLL_S)
    return False


def is_passed_on(run: KeptRun, lease: LeaseView, hook: GpuBrokerHook) -> bool:
    """Say whether a later try has the run by now: this one, which may be cut off, must not end it."""
    try:
        hook.renew(lease.lease_id, RenewBody(secret=lease.secret, epoch=lease.epoch))
    except LeaseLost as lost:
        return lost.reason == PASSED_ON
    except GpuProviderError as error:
        log.warning("Whether a later try has the run is asked of its keeper only: %s", error.message)
        return run.where.claim_id != lease.claim_id
    return False


def hook_for_the_end(hook: GpuBrokerHook) -> GpuBrokerHook:
    """Return a client for `is_task_over`: amid a signal nobody can ask Airflow for the connection."""
    return GpuBrokerHook(
        hook.gpu_conn_id, patience_s=_ASK_FOR_S / 2, timeout_s=_ASK_FOR_S / 2, connection=hook.connection()
    )
