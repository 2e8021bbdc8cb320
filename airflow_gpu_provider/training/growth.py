"""More memory for a run while it trains: when to ask for it, and what to do with the answer.

A shard that nears its limit, or that ran out of memory, makes the supervisor ask the holder of the lease. In
place: the limit is raised and nothing restarts. On other devices: a `handover`, after which the old places
are given back. Invariant: one change at a time, and nothing of the run is on a device before it is the
lease's or after it is given back. Where neither is possible, everything is as without growth.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from airflow_gpu_provider.training.children import Children
from airflow_gpu_provider.training.coordination import RunStore
from airflow_gpu_provider.training.failures import ShardFailure
from airflow_gpu_provider.training.fence import Fence
from airflow_gpu_provider.training.growth_words import Answer, Outcome, Question, Verb
from airflow_gpu_provider.training.handover import Handover, Stage
from airflow_gpu_provider.training.lease_talk import LeaseTalk
from airflow_gpu_provider.training.liveness import Liveness
from airflow_gpu_provider.training.membership import Membership
from airflow_gpu_provider.training.plan import RunPlan, Slot
from airflow_gpu_provider.training.run_file import RunRecord
from airflow_gpu_provider.training.slots import slot_on

log = logging.getLogger(__name__)

#: of what a shard has now; the most wanted first
_FACTORS = (2.0, 1.5, 1.25)
_ASK_AGAIN_S = 60.0
_NOBODY = ""  #: whom a vacant rank is promised to while its next holder is not started


@dataclass(frozen=True, slots=True)
class _Need:
    rank: int
    limit_mib: int
    why: str


class Growth:
    """What becomes of the lease of one run."""

    def __init__(
        self,
        plan: RunPlan,
        record: RunRecord,
        store: RunStore,
        children: Children,
        liveness: Liveness,
        fence: Fence,
        start: Callable[[Slot], str],
    ) -> None:
        self._plan = plan
        self._record = record
        self._store = store
        self._children = children
        self._liveness = liveness
        self._fence = fence
        self._start = start
        self._talk = LeaseTalk(plan)
        self._is_on = plan.grow_at is not None
        self._lost: list[
            _Need
        ] = []  #: ranks whose holder ran out of memory and that nothing was asked for yet
        self._need: _Need | None = None  #: what was asked for
        self._granted: Answer | None = None  #: the move that is open
        self._handover: Handover | None = None
        self._slots_before: tuple[Slot, ...] = children.slots
        self._quiet_until = 0.0
        self._answered_failures = 0  #: those before were answered by more memory
        self._limits: dict[str, int] = {}
        self.refusal: str | None = None  #: why there was no more memory, when it was asked last
        if self._talk.placed is not None:
            children.set_slots(self._talk.placed)

    # -- for the supervisor
    @property
    def promised(self) -> Mapping[int, str]:
        """The ranks that are kept for a process of their own, which may not be there yet."""
        kept = {need.rank: _NOBODY for need in (*self._lost, self._need) if need is not None}
        is_open = self._handover is not None and self._handover.stage in (Stage.WARMING, Stage.PAUSING)
        return {**kept, **self._handover.newcomers} if self._handover is not None and is_open else kept

    @property
    def wants_pause(self) -> bool:
        """True while the shards should stop at a synchronisation."""
        return self._handover is not None and self._handover.wants_pause

    def limits(self, membership: Membership) -> dict[str, int]:
        """Return the memory of each process whose limit is another than at its start."""
        return {uid: limit for uid, limit in self._limits.items() if uid in membership.alive}

    def unanswered(self, failures: list[ShardFailure]) -> list[ShardFailure]:
        """Return the failures since the run got more memory."""
        return failures[self._answered_failures :]

    def note_loss(self, failure: ShardFailure) -> None:
        """Keep the rank of a shard that ran out of its device's memory until more of it was asked for."""
        limit_mib = self._children.slot(failure.uid).memory_mib
        if not self._is_on or failure.rank is None or limit_mib is None:
            return
        if failure.is_of_device and failure.rank not in self.promised:
            self._lost.append(_Need(failure.rank, limit_mib, failure.sentence))

    def give_up(self) -> None:
        """Begin nothing more: the run ends. Processes that were started for a move are spares."""
        self._is_on, self._need, self._handover = False, None, None
        self._lost.clear()

    def tick(self, membership: Membership, now: float) -> Membership:
        """Do what is due and return the membership after it."""
        if not self._is_on:
            return membership
        if self._handover is not None:
            return self._move(self._handover, membership, now)
        if self._talk.asked is None:
            if (begun := self._talk.open_move) is not None:
                self._talk.open_move = None
                self._closing(Verb.DECLINE, begun, now)
            else:
                self._look(membership, now)
            return membership
        asked, answer = self._talk.asked, self._talk.hear(now)
        if answer is None:
            return membership
        if asked.verb is Verb.RESIZE:
            return self._hear(answer, membership, now)
        return self._close(asked, answer, membership)

    # -- asking
    def _look(self, membership: Membership, now: float) -> None:
        need = self._lost.pop(0) if self._lost else None
        if need is None and now >= self._quiet_until:
            need = next(filter(None, map(self._near_limit, membership.members.items())), None)
        if need is not None:
            self._need = need
            sizes = tuple(math.ceil(need.limit_mib * factor) for factor in _FACTORS)
            self._talk.ask(Question(verb=Verb.RESIZE, memory_mib=sizes, why=need.why), now)

    def _near_limit(self, member: tuple[str, int]) -> _Need | None:
        uid, rank = member
        used, limit = self._liveness.memory_mib(uid), self._children.slot(uid).memory_mib
        if used is None or limit is None or used < (self._plan.grow_at or 1) * limit:
            return None
        return _Need(rank, limit, f"shard {rank} has taken {used} MiB of the {limit} MiB that it may")

    def _hear(self, answer: Answer, membership: Membership, now: float) -> Membership:
        need, self._need = self._need, None
        self._quiet_until = now + _ASK_AGAIN_S
        if answer.outcome is Outcome.REFUSED:
            self.refusal = answer.sentence
            self._record.note(
                f"No more memory{'' if need is None else f', though {need.why}'}: {answer.sentence}"
            )
            return membership
        self.refusal, self._answered_failures = None, len(self._record.failures)
        why = "" if need is None else f"{need.why}: "
        self._record.growths.append(f"{why}{answer.sentence}")
        self._record.note(f"More memory: {why}{answer.sentence}")
        if answer.outcome is Outcome.MOVING:
            return self._begin_move(answer, membership, now)
        self._children.change_slots(lambda slot: moved_slot(slot, answer) or slot)
        for uid in membership.alive:
            if (limit := self._children.slot(uid).memory_mib) is not None:
                self._limits[uid] = limit
        self._talk.remember(self._children.slots)
        return membership

    # -- moving
    def _begin_move(self, answer: Answer, membership: Membership, now: float) -> Membership:
        gone = {old for old, _ in answer.moves}
        last = {f.rank: f.uid for f in self._record.failures if f.rank is not None}
        holders = {rank: last[rank] for rank in membership.vacant if rank in last}
        holders |= {rank: uid for uid, rank in membership.members.items()}
        slots = {rank: self._children.slot(uid) for rank, uid in holders.items()}
        leaving = {rank: slot for rank, slot in slots.items() if gone.intersection(slot.device_ids)}
        places = {rank: moved_slot(slot, answer) or slot for rank, slot in leaving.items()}
        self._granted, self._slots_before = answer, self._children.slots
        self._handover = Handover(
            self._children,
            self._liveness,
            self._fence,
            self._store,
            leave_within_s=self._plan.stop_grace_s,
            warm_within_s=self._plan.startup_timeout_s,
        )
        return self._handover.begin(places, self._start, membership, now)

    def _move(self, handover: Handover, membership: Membership, now: float) -> Membership:
        was_leaving = handover.stage is Stage.LEAVING
        membership = handover.step(membership, now)
        assert self._granted is not None
        if handover.stage is Stage.LEAVING and not was_leaving:
            membership = self._clear_old_places(self._granted, membership)
        if handover.stage in (Stage.DONE, Stage.FAILED):
            self._handover = None
            verb = Verb.COMMIT if handover.stage is Stage.DONE else Verb.DECLINE
            self._closing(verb, self._granted, now)
        return membership

    def _closing(self, verb: Verb, granted: Answer, now: float) -> None:
        closing = Question(verb=verb, memory_mib=(granted.memory_mib or 0,), moves=granted.moves)
        self._talk.ask(closing, now, slots=self._children.slots)

    def _clear_old_places(self, answer: Answer, membership: Membership) -> Membership:
        """End the spares in places that are given up, and start nothing there any more."""
        kept = {device.id for device in answer.devices} - {old for old, _ in answer.moves}
        stranded = (u for u in membership.spares if not kept.issuperset(self._children.slot(u).device_ids))
        membership = self._end(stranded, membership)
        moved = (moved_slot(slot, answer) for slot in self._children.slots)
        self._children.set_slots(tuple(slot for slot in moved if slot is not None))
        return membership

    def _close(self, asked: Question, answer: Answer, membership: Membership) -> Membership:
        self._granted = None
        if asked.verb is Verb.DECLINE:
            self._note_off(asked, "the processes in the new places were lost before they had taken over")
        if asked.verb is Verb.DECLINE or answer.outcome is Outcome.DONE:
            self._talk.remember(self._children.slots)
            return self._refill_spares(membership)
        # The move took longer than the new places were held for it: they may be another's by now.
        log.warning("The new devices are lost again: %s", answer.sentence)
        self.refusal = answer.sentence
        self._note_off(asked, answer.sentence)
        new = {new for _, new in asked.moves}
        self._children.set_slots(self._slots_before)
        self._talk.remember(self._children.slots)
        stranded = (u for u in membership.alive if new.intersection(self._children.slot(u).device_ids))
        return self._end(stranded, membership)

    def _note_off(self, asked: Question, why: str) -> None:
        """Take back what was told when the move began."""
        moves = [f"from {old} to {new}" for old, new in asked.moves]
        told = self._record.growths
        self._record.growths = [each for each in told if not all(move in each for move in moves)]
        self._record.note(f"The move {', '.join(moves)} is off: {why}")

    def _end(self, uids: Iterable[str], membership: Membership) -> Membership:
        ended = frozenset(uids)
        self._fence.shut_out(ended)
        return membership.lose(ended)

    def _refill_spares(self, membership: Membership) -> Membership:
        """Start spares in the new place for those that were ended with the old one."""
        for _ in range(len(self._children.slots) - len(membership.alive) - len(membership.vacant)):
            if (slot := self._children.free_slot(self._record.suspect_devices)) is not None:
                membership = membership.add_spare(self._start(slot))
        return membership


def moved_slot(slot: Slot, answer: Answer) -> Slot | None:
    """Return the place that a shard has after the lease changed; None: its devices are given back."""
    new_of, devices = dict(answer.moves), {device.id: device for device in answer.devices}
    names = [new_of.get(name, name) for name in slot.device_ids]
    if not names or not devices.keys() >= set(names):
        return None
    return slot_on([devices[name] for name in names])
