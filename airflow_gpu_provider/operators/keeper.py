"""Holds a training's lease, as ``python -m airflow_gpu_provider.operators.keeper RUN_DIR FILE``.

Started by the task in a session of its own, so that the training outlives the worker; it starts the run
through a launcher, renews the lease and gives it back with the run's report. A later try goes on with it by
leaving orders. It ends with its lease: when that is lost, taken back, or its task is over, which the broker
knows. SIGTERM is a person's end: the shards save. Everything below ends with it, and all hold the open FILE
that guards the training's folder (`sole_writer`). Next: `kept_lease`.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from airflow_gpu_provider.exceptions import LeaseLost, LeasePreempted, WorkerGroupFailed
from airflow_gpu_provider.launchers.base import TrainingRun
from airflow_gpu_provider.launchers.local import LocalLauncher
from airflow_gpu_provider.operators.growth_answers import GrowthAnswers
from airflow_gpu_provider.operators.keeper_files import KeeperEnd, Orders, Whereabouts, take_orders
from airflow_gpu_provider.operators.kept_lease import KeptLease
from airflow_gpu_provider.operators.run_report import StepsSeen, report_run
from airflow_gpu_provider.training.next_try import note_lost_lease
from airflow_gpu_provider.training.parenthood import name_process
from airflow_gpu_provider.training.plan import RunPaths, RunPlan
from airflow_gpu_provider.training.process_identity import started_at
from airflow_gpu_provider.training.run_file import RunRecord, RunState
from airflow_gpu_provider.wire import TASK_OVER, RequestBody

log = logging.getLogger(__name__)

_POLL_S = 0.2


class Keeper:
    """One lease and the run that works with it."""

    def __init__(self, run_dir: Path, lease: KeptLease, guarded: int) -> None:
        self._launcher = LocalLauncher(keep_open=(guarded,))
        self._paths = RunPaths(run_dir)
        self._plan = RunPlan.model_validate_json(self._paths.plan.read_text())
        self._lease = lease
        self._steps = StepsSeen()
        self._saved_step: int | None = None
        self._request: RequestBody | None = None  #: what the lease was changed to, as was noted last
        self._is_asked_to_stop = False
        self._untold: dict[str, Any] = {}

    def run(self) -> None:
        """Train, give the lease back, and leave word of how that ended."""
        signal.signal(signal.SIGTERM, self._on_term)
        try:
            with self._lease.working():
                try:
                    self._train()
                finally:
                    self._obey()  # it is given back in the newest epoch
        except LeasePreempted as taken:
            self._note(end=KeeperEnd.PREEMPTED, why=taken.message)
        except LeaseLost as lost:
            self._note(end=KeeperEnd.LOST, why=lost.message)
        except WorkerGroupFailed as failed:
            log.info("%s", failed.message)
            self._note(end=KeeperEnd.DONE, why=failed.message)
        else:
            self._note(end=KeeperEnd.DONE)

    def _train(self) -> None:
        run = self._launcher.start(self._plan)
        self._lease.works_for(run)
        try:
            self._note(guard=run.pid, guard_started=started_at(run.pid) or "")
            record = self._follow(run)
        except LeaseLost as lost:
            if not isinstance(lost, LeasePreempted) and lost.reason != TASK_OVER:  # else it may still save
                run.kill()
            note_lost_lease(self._plan.run_dir, lost.message)
            raise
        finally:
            run.stop()  # let the shards save; a no-op for a run that has ended
        report_run(record, self._steps, self._plan, self._lease)
        if record.state is not RunState.SUCCEEDED:
            raise WorkerGroupFailed(f"The training ended {record.state.value}: {record.error}")

    def _follow(self, run: TrainingRun) -> RunRecord:
        """Return the last record of the run once it has ended. Raise LeaseLost, or LeasePreempted."""
        answers = GrowthAnswers(self._lease, self._plan.run_dir)
        while True:
            has_ended = run.has_ended()  # asked first: the record read after it is the last one
            self._obey()
            if self._untold:
                self._note()
            self._lease.raise_if_lost()
            if not has_ended:  # a run that has ended has nothing left to give way with
                self._lease.raise_if_ending()
                answers.look()
                self._note_request()
                if self._is_asked_to_stop:
                    run.stop()
            record = run.record()
            if record is not None:
                self._steps.note(record)
                self._note_checkpoint(record)
            if has_ended:
                break
            time.sleep(_POLL_S)
        if record is None or not record.state.is_terminal:
            raise WorkerGroupFailed(f"The training broke off: {run.explain_end()}")
        return record

    def _note_request(self) -> None:
        """Tell what the lease is by now: a later try takes it over by asking for the same."""
        if self._lease.request not in (None, self._request):
            self._request = self._lease.request
            self._note(request=self._request)

    def _note_checkpoint(self, record: RunRecord) -> None:
        step = record.checkpoint.step if record.checkpoint else None
        if record.script is not None:
            step = record.script.saved_at_ns or None
        if step is not None and step != self._saved_step:
            self._saved_step = step
            self._lease.note_checkpoint()

    def _obey(self) -> None:
        """Hold the lease for a later try from now on, when one has left orders."""
        orders = take_orders(self._paths.keeper_orders)
        if orders is not None and orders.lease.lease_id == self._lease.lease_id:
            log.info("A later try of the task goes on with this run, in epoch %d", orders.lease.epoch)
            self._lease.adopt(orders.lease, orders.broker.hook())
            self._note(claim_id=orders.lease.claim_id)

    def _note(self, **changes: Any) -> None:
        """Tell later tries; what a full disk does not take is told once it does, and never ends the run."""
        self._untold.update(changes)
        where = Whereabouts.read(self._paths.keeper)
        if where is None:
            return
        try:
            where.model_copy(update=self._untold).write(self._paths.keeper)
        except OSError as error:
            if changes:
                log.warning("%s cannot be written, tried again: %s", self._paths.keeper, error)
            return
        self._untold.clear()

    def _on_term(self, _number: int, _frame: FrameType | None) -> None:
        self._is_asked_to_stop = True


def main(run_dir: Path, guarded: int) -> int:
    """Wait for orders; without any the task has ended before it could give them."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    name_process("keeper")
    if not (text := sys.stdin.read()):
        return 1
    orders = Orders.model_validate_json(text)
    Keeper(run_dir, KeptLease(orders.lease, orders.broker.hook()), guarded).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
