"""The process that owns the run of a plain script, forked by the `guard`.

A script knows neither ranks that move nor rollback, so recovery is a restart of all its processes within the
attempt, on the same lease: they go on from what they saved in AGP_CHECKPOINT_DIR. Few restarts are allowed
while nothing new is saved there (`respawns`). The cause of a loss is classified as for shards; what would
come again ends the run at once. Invariant: a round begins only when no process of the last one can act.
"""

from __future__ import annotations

import logging
import time

from airflow_gpu_provider.training.chronicle import Chronicle
from airflow_gpu_provider.training.failures import FailureCause, Remains, ShardFailure, classify
from airflow_gpu_provider.training.parenthood import adopt_orphans
from airflow_gpu_provider.training.plan import RunPlan, Slot
from airflow_gpu_provider.training.respawns import RestartBudget
from airflow_gpu_provider.training.run_file import RunRecord, RunState, ScriptRecord
from airflow_gpu_provider.training.script import CHECKPOINT_VARIABLE, Script
from airflow_gpu_provider.training.script_errors import first_cause, is_collateral
from airflow_gpu_provider.training.script_processes import ScriptProcesses
from airflow_gpu_provider.training.script_silence import Silence, newest_change_ns
from airflow_gpu_provider.training.stop_request import StopRequest

log = logging.getLogger(__name__)

_TICK_S = 0.05
_LOOK_EVERY_S = 1.0
#: how long the rank that is the cause may take to end after those that only lost it
_SETTLE_S = 5.0


class ScriptSupervisor:
    """One run of a script, from the first round to the last."""

    def __init__(self, plan: RunPlan, script: Script, previous: RunRecord | None) -> None:
        self._plan = plan
        self._chronicle = Chronicle(plan, previous)
        self.record = self._chronicle.record
        self._outcome = self.record.script or ScriptRecord(checkpoint_dir=str(plan.checkpoint_dir))
        self.record.script = self._outcome
        self._slots = list(plan.member_slots)
        self._processes = ScriptProcesses(plan, script)
        self._budget = RestartBudget(plan.max_respawns)
        self._stop = StopRequest()
        for rank, slot in enumerate(self._slots):  # a supervisor before this one may have found some
            if set(slot.device_ids) & set(self.record.suspect_devices):
                self._slots[rank] = self._spare_slot() or slot
        now = time.monotonic()
        self._silence = Silence(now)
        self._looked_at = self._round_began_at = now
        self._saved_at_ns = 0
        self._failed_at: float | None = None
        self._stopped_since: dict[int, float] = {}

    def run(self) -> int:
        """Run the script to its end and return the exit code: 0 only for a run that succeeded."""
        self._stop.listen()
        adopt_orphans()
        try:
            self._plan.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            self._saved_at_ns = newest_change_ns(self._plan.checkpoint_dir)
            self._start_round()
            while not self.record.state.is_terminal:
                self._tick(time.monotonic())
                time.sleep(_TICK_S)
        finally:
            self._processes.end_all()
            self._chronicle.write(force=True)
        log.info("The run ended: %s %s", self.record.state.value, self.record.error or "")
        return 0 if self.record.state is RunState.SUCCEEDED else 1

    def _start_round(self) -> None:
        """Start all ranks, each in its slot."""
        begun = self.record.processes_started
        uids = [f"u{begun + rank}" for rank in range(self._plan.shard_count)]
        self.record.processes_started += len(uids)
        self.record.members = {uid: rank for rank, uid in enumerate(uids)}
        self._failed_at, self._stopped_since = None, {}
        self._round_began_at = time.monotonic()
        self._silence = Silence(self._round_began_at)
        self._processes.start(self._slots, uids, restarts=self._outcome.restarts)
        self.record.state = RunState.RUNNING
        self._chronicle.write(force=True)

    def _tick(self, now: float) -> None:
        self._look(now)
        codes = self._processes.exit_codes()
        if self._stop.is_asked:
            self._end_when_stopped(now, all_gone=len(codes) == self._plan.shard_count)
        elif all(codes.get(rank) == 0 for rank in range(self._plan.shard_count)):
            self.record.state = RunState.SUCCEEDED
        elif (cause := self._loss(codes, now)) is not None:
            self._recover(cause)
        self._chronicle.write()

    # -- hearing -------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Note signs of life, and which ranks a signal has stopped."""
        states = self._processes.states()
        for rank, state in states.items():
            if not state.is_stopped:
                self._stopped_since.pop(rank, None)
            else:
                self._stopped_since.setdefault(rank, now)
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        newest = newest_change_ns(self._plan.checkpoint_dir)
        if newest > self._saved_at_ns:
            self._saved_at_ns = self._outcome.saved_at_ns = newest
        self._silence.look(
            now,
            cpu_s={rank: state.cpu_s for rank, state in states.items()},
            output_bytes=self._processes.output_bytes(),
            saved_at_ns=self._saved_at_ns,
        )
        self.record.respawns_left = self._budget.left(self._saved_at_ns, lasted_s=now - self._round_began_at)

    def _loss(self, codes: dict[int, int], now: float) -> ShardFailure | None:
        """Return the failure that ends this round, None while there is none or its cause is still to come."""
        failures = [
            self._failure(rank, self._processes.remains(rank)) for rank, code in codes.items() if code
        ]
        failures += [
            self._failure(rank, Remains(stopped_for_s=now - since))
            for rank, since in self._stopped_since.items()
            if rank not in codes and now - since > self._plan.stopped_timeout_s
        ]
        if not failures:
            return self._hang(codes, now)
        if self._failed_at is None:
            self._failed_at = now
        cause = first_cause(failures)
        is_settled = len(codes) == self._plan.shard_count or now - self._failed_at > _SETTLE_S
        return cause if is_settled or not is_collateral(cause) else None

    def _hang(self, codes: dict[int, int], now: float) -> ShardFailure | None:
        silent_s = self._silence.lasts_for(now)
        if silent_s <= self._plan.stall_timeout_s:
            return None
        rank = next(rank for rank in range(self._plan.shard_count) if rank not in codes)
        ended = f"; rank(s) {', '.join(map(str, sorted(codes)))} had ended before" if codes else ""
        return ShardFailure(
            uid=self._processes.uid(rank),
            rank=rank,
            step=None,
            cause=FailureCause.HUNG,
            evidence=f"no rank computed, printed or saved anything for {silent_s:.0f} s{ended}",
        )

    def _failure(self, rank: int, remains: Remains) -> ShardFailure:
        cause, evidence = classify(remains)
        uid = self._processes.uid(rank)
        return ShardFailure(uid=uid, rank=rank, step=None, cause=cause, evidence=evidence)

    # -- acting --------------------------------------------------------------------------------------------

    def _recover(self, loss: ShardFailure) -> None:
        log.warning("Lost: %s", loss.sentence)
        staying = self._processes.end_all()
        if staying:
            evidence = "; ".join((loss.evidence, *staying.values()))
            loss = loss.model_copy(update={"evidence": evidence})
        self._saved_at_ns = newest_change_ns(self._plan.checkpoint_dir)
        earlier = [f for f in self.record.failures if f.rank == loss.rank and f.cause is loss.cause]
        self.record.failures.append(loss)
        if loss.cause.ends_run or (loss.cause is FailureCause.OUT_OF_MEMORY and earlier):
            self._fail(loss.sentence, hopeless=loss.cause.is_hopeless)
            return
        lasted_s = time.monotonic() - self._round_began_at
        if self._budget.left(self._saved_at_ns, lasted_s=lasted_s) <= 0:
            self._fail(self._why_no_restart(loss))
            return
        faulty = {loss.rank} if loss.cause is FailureCause.GPU_FAULT and loss.rank is not None else set()
        moved = self._leave_suspect(faulty | staying.keys(), loss)
        if moved is not None:
            self._budget.spend(self._saved_at_ns, lasted_s=lasted_s)
            self._outcome.restarts += 1
            self.record.generation += 1
            sentence = (
                f"restart {self._outcome.restarts} of all processes after the loss of {loss.uid}{moved}"
            )
            log.info("%s", sentence)
            self.record.takeovers.append(sentence)
            self._start_round()

    def _why_no_restart(self, loss: ShardFailure) -> str:
        if self._budget.is_saving(self._saved_at_ns):
            return (
                f"the script was restarted {self._budget.most} times in a row although none of these rounds "
                f"lasted {self._budget.STEADY_S / 60:g} minutes; it saved something each time: see if it "
                f"gets on by that; the last loss: {loss.sentence}. A retry goes on from what it saved."
            )
        return (
            f"the script was started {self._plan.max_respawns + 1} times without saving anything new in "
            f"{CHECKPOINT_VARIABLE} ({self._plan.checkpoint_dir}); the last loss: {loss.sentence}. Let "
            "it save there and load the newest file at its start, so that a restart goes on."
        )

    def _leave_suspect(self, ranks: set[int], loss: ShardFailure) -> str | None:
        """Give ranks whose devices are faulty, or taken by what stays, others; None: the run has failed."""
        for rank in ranks:
            self.record.suspect_devices += self._slots[rank].device_ids
        moved = ""
        for rank in sorted(ranks):
            slot = self._spare_slot()
            if slot is None:
                self._fail(f"the device of rank {rank} is faulty and the lease has no other: {loss.sentence}")
                return None
            self._slots[rank] = slot
            moved += f"; rank {rank} moved to {', '.join(slot.device_ids) or 'another device'}"
        return moved

    def _spare_slot(self) -> Slot | None:
        """Return a spare slot whose devices are neither suspect nor used by a rank."""
        taken = {device for slot in self._slots for device in slot.device_ids}
        taken.update(self.record.suspect_devices)
        return next((slot for slot in self._plan.spare_slots if not taken & set(slot.device_ids)), None)

    def _end_when_stopped(self, now: float, *, all_gone: bool) -> None:
        if self._stop.deadline is None:
            log.info("Stopping: %s", self._stop.reason)
            self.record.orphaned = self._stop.is_orphaned
            self._stop.deadline = now + self._plan.stop_grace_s
            self._processes.ask_to_stop()
        if all_gone or now >= self._stop.deadline:
            self.record.error = f"stopped ({self._stop.reason})"
            self.record.state = RunState.STOPPED

    def _fail(self, sentence: str, *, hopeless: bool = False) -> None:
        self.record.error = sentence
        self.record.hopeless = hopeless
        self.record.state = RunState.FAILED
