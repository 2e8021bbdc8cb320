"""The process that owns a run, forked by the `guard`.

Hosts the store, starts the shards, notices those that end or fall silent, gives their ranks to spares and
writes run.json. It never computes, so it survives what kills a shard. Invariant: a generation is published
only after the processes it replaces are gone (`fence`). Asked to stop (SIGTERM; SIGHUP: whoever started the
run is gone) it lets the shards save first. Its own shards end with it: its successor starts from the
checkpoint.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from airflow_gpu_provider.training.children import Children
from airflow_gpu_provider.training.chronicle import Chronicle
from airflow_gpu_provider.training.coordination import Control, host_store
from airflow_gpu_provider.training.failures import FailureCause, ShardFailure
from airflow_gpu_provider.training.fence import Fence
from airflow_gpu_provider.training.lease_changes import changes_of
from airflow_gpu_provider.training.membership import Membership
from airflow_gpu_provider.training.network_watch import NetworkWatch
from airflow_gpu_provider.training.nursery import Nursery
from airflow_gpu_provider.training.observer import Observer
from airflow_gpu_provider.training.plan import RunPlan, Slot
from airflow_gpu_provider.training.respawns import RespawnBudget, unfilled
from airflow_gpu_provider.training.run_file import RunRecord, RunState
from airflow_gpu_provider.training.stop_request import StopRequest
from airflow_gpu_provider.training.sync_retries import MAX_TRIES, SyncRetries, Verdict
from airflow_gpu_provider.training.wakeup import Wakeup
from airflow_gpu_provider.training.watch import Watch

log = logging.getLogger(__name__)

_TICK_S = 0.05
#: as often as hearts beat; a process that ends wakes the supervisor
_LOOK_EVERY_S = 0.2


class Supervisor:
    """One run, from the first process to the last."""

    def __init__(self, plan: RunPlan, plan_file: Path, previous: RunRecord | None) -> None:
        self._plan = plan
        nursery = Nursery.open()  # before the store, which starts threads
        self._store, address = host_store()
        self._children = Children(plan, plan_file, nursery, address=address, prefix=self._store.prefix)
        self._watch = Watch(plan, self._store, self._children)
        self._liveness = self._watch.liveness
        self._chronicle = Chronicle(plan, previous)
        self.record = self._chronicle.record
        self._observer = Observer(plan, self._children, self.record)
        self._started = self.record.processes_started
        self._fence = Fence(self._children, self._liveness, self.record)
        self._growth = changes_of(
            plan, self.record, self._store, self._children, self._liveness, self._fence, self._start_process
        )
        uids = tuple(f"u{self._started + n}" for n in range(len(self._children.slots)))
        members, spares = uids[: plan.shard_count], uids[plan.shard_count :]
        self._membership = Membership.first(members, spares, generation=self.record.generation)
        self._published: Control | None = None
        self._network = NetworkWatch(plan, self._store, self.record)
        self._retries = SyncRetries()
        self._respawns = RespawnBudget(plan.max_respawns)
        self._stop = StopRequest()
        self._final_seen = False
        self._look_at = 0.0

    def run(self) -> int:
        """Train to the end and return the exit code: 0 only for a run that succeeded."""
        self._stop.listen()
        wakeup = Wakeup()
        try:
            self._publish()
            for slot in self._children.slots:
                self._start_process(slot)
            while not self.record.state.is_terminal:
                self._tick(time.monotonic())
                wakeup.sleep(self._look_at - time.monotonic())
        finally:
            self._fence.shut_out_all()
            self._write(force=True)
        log.info("The run ended: %s %s", self.record.state.value, self.record.error or "")
        return 0 if self.record.state is RunState.SUCCEEDED else 1

    def _tick(self, now: float) -> None:
        is_look = now >= self._look_at
        if is_look:
            self._look_at = now + _LOOK_EVERY_S
            self._listen(now)
            self._take_announcements()
        self._stop_when_asked(now)
        if is_look or self._watch.has_one_ended(self._membership):
            self._replace_lost(now)
        if is_look and not self.record.state.is_terminal:
            self._grow(now)
            self._retry_broken_synchronisation(now)
            self._follow_network(now)
            self._end_when_done(now)
            self._children.reap_strays()
        self._write()

    # -- hearing -------------------------------------------------------------------------------------------

    def _listen(self, now: float) -> None:
        self._watch.look(self._membership.alive, now)
        for sentence in self._watch.take_sentences():
            self.record.note(sentence)
        self.record.step = max(0, self._liveness.version())
        self._observer.observe(self._watch.counters, self._membership, self._liveness, now)
        self._note_respawns(self._respawns.left(self._liveness.version()))
        if self.record.step > 0 and self.record.state is RunState.STARTING:
            self.record.state = RunState.RUNNING

    def _take_announcements(self) -> None:
        self._chronicle.take_announcements(self._store)
        if not self._final_seen and self._store.get("final") is not None:
            self._final_seen = True
            self._growth.give_up()
            self.record.state = RunState.FINISHING
            self._publish()

    def _end_when_done(self, now: float) -> None:
        if not self._is_done():
            return
        members = self._membership.members
        rank_zero = next(uid for uid, rank in members.items() if rank == 0)
        word = self._store.get(f"done/{rank_zero}")
        self.record.result = word["result"] if isinstance(word, dict) else None
        self.record.state = RunState.SUCCEEDED
        self.record.step = self.record.step_count or self.record.step
        for uid in members:  # they have said all they had to; let them write their last lines
            while self._children.exit_code(uid) is None and time.monotonic() < now + 5:
                time.sleep(_TICK_S)

    def _is_done(self) -> bool:
        done = [f"done/{uid}" for uid in self._membership.members]
        return self._membership.is_complete and self._store.has(done)

    # -- replacing -----------------------------------------------------------------------------------------

    def _replace_lost(self, now: float) -> None:
        lost = self._watch.lost(self._membership, now)
        if not lost and self._membership.is_complete:
            return
        lost = self._fence.shut_out_lost(lost)
        for failure in lost:
            self._growth.note_loss(failure)
        self.record.failures += lost
        ending = next((failure for failure in lost if self._must_end(failure)), None)
        if ending is not None:
            refusal = self._growth.refusal if ending.is_of_device else None
            more = f"; more memory was asked for and refused: {refusal}" if refusal else ""
            self._fail(ending.sentence + more, hopeless=ending.cause.is_hopeless)
            return
        self._membership = self._membership.lose(frozenset(failure.uid for failure in lost))
        if not self._stop.is_asked:
            self._fill_vacancies()

    def _must_end(self, failure: ShardFailure) -> bool:
        """Say whether a spare would do no better: the author's error, or a rank out of memory again."""
        is_repeated = failure.cause is FailureCause.OUT_OF_MEMORY and failure.rank is not None
        failures = self._growth.unanswered(self.record.failures)
        earlier = [f for f in failures if f.rank == failure.rank and f.cause is failure.cause]
        return failure.cause.ends_run or (is_repeated and len(earlier) > 1)

    def _fill_vacancies(self) -> None:
        self._refill_spares()
        before = self._membership.generation
        promised = self._growth.promised
        self._membership, taken = self._membership.fill(self._liveness.parked(), promised=promised)
        holders = {failure.rank: failure.uid for failure in self.record.failures}
        for uid, rank in taken.items():
            sentence = f"{uid} took rank {rank} of {holders.get(rank, 'a lost shard')}"
            log.info("Takeover: %s", sentence)
            self.record.takeovers.append(sentence)
        if self._membership.generation != before:
            self._retries.explained()
            self._publish()
        elif not promised.keys() >= set(self._membership.vacant):
            last = self.record.failures[-1].sentence if self.record.failures else "with the places of a move"
            budget = (self.record.respawns_left, self._plan.max_respawns)
            self._fail(unfilled(len(self._membership.vacant), *budget, last=last))

    def _refill_spares(self) -> None:
        """Start replacements for lost processes: at once for a vacant rank, in the background for a spare."""
        promised = self._growth.promised
        vacant = sum(rank not in promised for rank in self._membership.vacant)
        spares = sum(uid not in promised.values() for uid in self._membership.spares)
        wanted = vacant + len(self._children.slots) - self._plan.shard_count - spares
        for _ in range(min(wanted, self.record.respawns_left)):
            slot = self._children.free_slot(self.record.suspect_devices, besides=promised.values())
            if slot is None:
                log.warning("No replacement is started: all free devices are suspect")
                return
            self._respawns.spend(self._liveness.version())
            self.record.respawns_left -= 1
            uid = self._start_process(slot)
            self._membership = self._membership.add_spare(uid)
            log.info("%s is started as a replacement, %d respawns left", uid, self.record.respawns_left)

    def _note_respawns(self, left: int) -> None:
        """Keep what is left; when progress brings some back, spares that were not replaced are."""
        before, self.record.respawns_left = self.record.respawns_left, left
        is_calm = self._membership.is_complete and not self._growth.promised
        if left > before and is_calm and not (self._stop.is_asked or self._final_seen):
            self._refill_spares()

    def _grow(self, now: float) -> None:
        if self._stop.is_asked:
            self._growth.give_up()
        self._membership = self._growth.tick(self._membership, now)
        if self._control() != self._published:
            self._publish()

    def _start_process(self, slot: Slot) -> str:
        uid = f"u{self._started}"
        self._started += 1
        self.record.processes_started = self._started
        self._children.start(uid, slot)
        self._liveness.watch(uid, time.monotonic())
        return uid

    # -- retrying ------------------------------------------------------------------------------------------

    def _retry_broken_synchronisation(self, now: float) -> None:
        """Make a new generation of the same shards when a collective failed although nobody died."""
        fault = self._store.get(f"fault/{self._membership.generation}")
        if not isinstance(fault, dict) or not self._membership.is_complete or self._stop.is_asked:
            return
        verdict = self._retries.judge(version=self.record.step, now=now)
        if verdict is Verdict.WAIT:
            return
        if verdict is Verdict.GIVE_UP:
            self._fail(
                f"The shards could not synchronise after step {self.record.step}: {MAX_TRIES} retries "
                f"failed, the last with {fault['reason']}. Check the network between the devices; a retry "
                "resumes from the last checkpoint."
            )
            return
        self.record.sync_retries += 1
        log.warning(
            "Synchronisation failed at %s: %s; try %d", fault["uid"], fault["reason"], self._retries.tries
        )
        self._membership = self._membership.next()
        self._publish()

    def _follow_network(self, now: float) -> None:
        """Deal out ranks anew, or let the shards share less or more often, as their latency asks."""
        if self._stop.is_asked or self._final_seen or self._growth.wants_pause:
            return
        changed = self._network.look(self._membership, now)
        if changed is not None:
            self._membership = changed
            self._publish()

    # -- stopping ------------------------------------------------------------------------------------------

    def _stop_when_asked(self, now: float) -> None:
        if not self._stop.is_asked or self._is_done():
            return
        if self._stop.deadline is None:
            log.info("Stopping: %s", self._stop.reason)
            self.record.orphaned = self._stop.is_orphaned
            self._stop.deadline = now + self._plan.stop_grace_s
            self._publish()
        gone = all(self._children.exit_code(uid) is not None for uid in self._membership.alive)
        if gone or now >= self._stop.deadline:
            self._chronicle.take_announcements(self._store)
            step = self.record.checkpoint.step if self.record.checkpoint else None
            self.record.error = f"stopped ({self._stop.reason}); the last checkpoint is of step {step}"
            self.record.state = RunState.STOPPED

    def _fail(self, sentence: str, *, hopeless: bool = False) -> None:
        self.record.error = sentence
        self.record.hopeless = hopeless
        self.record.state = RunState.FAILED

    # -- telling -------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        self._published = self._control()
        self._store.put_control(self._published)

    def _control(self) -> Control:
        return Control(
            generation=self._membership.generation,
            members=self._membership.members,
            finishing=self._final_seen,
            stop=self._stop.is_asked,
            pause=self._growth.wants_pause,
            limits=self._growth.limits(self._membership),
            sync_interval=self._network.sync_interval,
        )

    def _write(self, *, force: bool = False) -> None:
        self._chronicle.note_members(self._membership, self._liveness)
        self._chronicle.write(force=force)
