"""As many devices for a run as are idle, between the bounds of its author: asked for while it trains.

Every other second the holder of the lease is asked to let it be as large as it can, and tells how many of its
devices would let others start. Shards change devices in a `handover`. Invariant: one change at a time, and
nothing of the run is on a device before it is the lease's or after it is given back. A change that fails
leaves the run where it was; what it did not come to use goes back. Which shard is where: `elastic`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from airflow_gpu_provider.training.children import Children
from airflow_gpu_provider.training.coordination import RunStore
from airflow_gpu_provider.training.elastic import Calm, elastic_slots, kept_devices
from airflow_gpu_provider.training.failures import ShardFailure
from airflow_gpu_provider.training.fence import Fence
from airflow_gpu_provider.training.growth_words import Answer, GrownDevice, Outcome, Question, Verb
from airflow_gpu_provider.training.handover import Handover, Stage
from airflow_gpu_provider.training.lease_talk import LeaseTalk
from airflow_gpu_provider.training.liveness import Liveness
from airflow_gpu_provider.training.membership import Membership
from airflow_gpu_provider.training.plan import RunPlan, Slot
from airflow_gpu_provider.training.run_file import RunRecord, RunState
from airflow_gpu_provider.training.shard_range import ShardRange

log = logging.getLogger(__name__)

_ASK_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class _Change:
    """Where the processes will be, and which devices the run has no more use for then."""

    slots: tuple[Slot, ...]
    leave: tuple[str, ...]
    sentence: str


class Refit:
    """The devices of one run."""

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
        assert plan.least_devices is not None
        self._plan = plan
        self._record = record
        self._store = store
        self._children = children
        self._liveness = liveness
        self._fence = fence
        self._start = start
        self._range = ShardRange(plan.least_devices, plan.shard_count)
        self._talk = LeaseTalk(plan)
        self._calm = Calm()
        self._is_on = True
        self._ask_at = 0.0
        self._held: tuple[str, ...] | None = None  #: the devices of the lease, as it was told last
        self._change: _Change | None = None
        self._handover: Handover | None = None
        self.refusal: str | None = None
        if self._talk.placed is not None:
            children.set_slots(self._talk.placed)

    # -- for the supervisor
    @property
    def promised(self) -> Mapping[int, str]:
        """The ranks that are kept for a newcomer."""
        is_open = self._handover is not None and self._handover.stage in (Stage.WARMING, Stage.PAUSING)
        return self._handover.newcomers if self._handover is not None and is_open else {}

    @property
    def wants_pause(self) -> bool:
        """True while the shards should stop at a synchronisation."""
        return self._handover is not None and self._handover.wants_pause

    def limits(self, membership: Membership) -> dict[str, int]:
        """Return none: the memory of a process is the same on each device."""
        return {}

    def unanswered(self, failures: list[ShardFailure]) -> list[ShardFailure]:
        """Return all failures: another device has no more memory."""
        return failures

    def note_loss(self, failure: ShardFailure) -> None:
        """Leave it to the spares; a newcomer that is lost ends the handover."""

    def give_up(self) -> None:
        """Begin nothing more: the run ends. Processes that were started for a change are spares."""
        self._is_on, self._handover, self._change = False, None, None

    def tick(self, membership: Membership, now: float) -> Membership:
        """Do what is due and return the membership after it."""
        if not self._is_on:
            return membership
        if self._handover is not None:
            if self._is_wanted_back(self._handover, now):
                membership = self._handover.call_off(membership)
            return self._go_on(self._handover, membership, now)
        if self._talk.asked is None:
            self._ask(now)
            return membership
        asked, answer = self._talk.asked, self._talk.hear(now)
        if answer is None:
            return membership
        if asked.verb is Verb.LEAVE:
            return self._left(asked, answer, membership)
        return self._hear(answer, membership, now)

    # -- asking
    def _ask(self, now: float) -> None:
        held = len(self._held) if self._held is not None else self._range.least
        self._ask_for(self._calm.most(held, self._range, now), held, now)

    def _is_wanted_back(self, handover: Handover, now: float) -> bool:
        """Say whether others wait for devices on which newcomers, who may take long, get ready still."""
        if handover.stage is not Stage.WARMING or self._change is None or self._change.leave:
            return False
        if self._talk.asked is None:
            held = len(self._held or ())
            self._ask_for(held, held, now)
            return False
        is_fit, answer = self._talk.asked.verb is Verb.FIT, self._talk.hear(now)
        return is_fit and answer is not None and answer.wanted_back > 0

    def _ask_for(self, most: int, held: int, now: float) -> None:
        if now < self._ask_at or self._record.state is not RunState.RUNNING or most <= self._range.least:
            return
        self._ask_at = now + _ASK_EVERY_S
        bounds = (self._range.least, most)
        try:
            self._talk.ask(Question(verb=Verb.FIT, bounds=bounds, why=f"{held} now"), now)
        except OSError as error:  # a full disk: training goes on with what there is
            log.warning("The holder of the lease could not be asked: %s", error)

    def _hear(self, answer: Answer, membership: Membership, now: float) -> Membership:
        if answer.outcome is Outcome.REFUSED:
            log.debug("The devices stay as they are: %s", answer.sentence)
            return membership
        self._held = tuple(device.id for device in answer.devices)
        if not membership.is_complete:
            return membership  # asked again when every rank has a holder
        change = self._planned(answer, membership)
        at = self._places(membership)
        newcomers = {
            rank: slot
            for rank, slot in enumerate(change.slots[: self._plan.shard_count])
            if slot.device_ids != (at[rank],)
        }
        if not newcomers:
            return self._settle(change, membership, now) if change.leave else membership
        log.info("%s", change.sentence)
        self._change = change
        self._handover = Handover(
            self._children,
            self._liveness,
            self._fence,
            self._store,
            leave_within_s=self._plan.stop_grace_s,
            warm_within_s=self._plan.startup_timeout_s,
        )
        return self._handover.begin(newcomers, self._start, membership, now)

    def _planned(self, answer: Answer, membership: Membership) -> _Change:
        """Return where everything goes: off the last devices where others want them, and off suspect ones."""
        held = {device.id: device for device in answer.devices}
        kept = kept_devices(tuple(held), self._range, answer.wanted_back)
        used = [held[name] for name in kept if name not in self._record.suspect_devices]
        used = used or [held[name] for name in kept]
        spares: list[str | None] = [self._children.slot(uid).device_ids[0] for uid in membership.spares]
        spares = (spares + [None] * len(self._plan.spare_slots))[: len(self._plan.spare_slots)]
        slots = elastic_slots(used, self._range, spares=spares, at=self._places(membership))
        leave = tuple(name for name in held if name not in kept)
        why = f"others wait for {len(leave)} of the {len(held)}" if leave else "they were idle"
        return _Change(slots, leave, f"{self._plan.shard_count} shards on {_names(used)}: {why}")

    def _used(self, membership: Membership) -> set[str]:
        return {name for uid in membership.alive for name in self._children.slot(uid).device_ids}

    def _places(self, membership: Membership) -> dict[int, str]:
        return {rank: self._children.slot(uid).device_ids[0] for uid, rank in membership.members.items()}

    # -- changing
    def _go_on(self, handover: Handover, membership: Membership, now: float) -> Membership:
        was_leaving = handover.stage is Stage.LEAVING
        membership = handover.step(membership, now)
        assert self._change is not None
        if handover.stage is Stage.LEAVING and not was_leaving:
            membership = self._clear(self._change, membership)
        if handover.stage is Stage.DONE:
            self._handover = None
            membership = self._settle(self._change, membership, now)
        elif handover.stage is Stage.FAILED:
            self._handover = None
            self._stay(membership, now)
        return membership

    def _clear(self, change: _Change, membership: Membership) -> Membership:
        """Start nothing in the old places any more, and end the spares on devices that are given back."""
        self._children.set_slots(change.slots)
        stranded = frozenset(
            uid
            for uid in membership.spares
            if not set(change.leave).isdisjoint(self._children.slot(uid).device_ids)
        )
        self._fence.shut_out(stranded)
        return membership.lose(stranded)

    def _settle(self, change: _Change, membership: Membership, now: float) -> Membership:
        """Be in the new places, and give back what is not needed there."""
        membership = self._clear(change, membership)
        self._change = None
        used = self._used(membership)  # by a spare, say, that took a rank there meanwhile: its turn comes
        leave = tuple(name for name in change.leave if name not in used)
        self._record.growths.append(f"{change.sentence}, from step {self._record.step} on")
        self._record.note(change.sentence)
        if leave:
            self._calm = self._calm.gave_back(now)
            self._give_back(leave, now)
        else:
            self._calm = self._calm if change.leave else self._calm.took(now)
            self._talk.remember(self._children.slots)
        return self._refill_spares(membership)

    def _stay(self, membership: Membership, now: float) -> None:
        """Go on as before a change that failed; what the run did not come to use goes back."""
        change, self._change = self._change, None
        used = self._used(membership)
        unused = [name for name in self._held or () if name not in used]
        self._calm = self._calm.gave_back(now)
        self._ask_at = now + _ASK_EVERY_S
        sentence = "" if change is None else change.sentence
        self._record.note(f"The devices stay as they were, nothing came to work on new ones ({sentence})")
        spare = max(0, len(self._held or ()) - self._range.least)
        if unused[:spare]:
            self._give_back(tuple(unused[:spare]), now)

    def _give_back(self, devices: tuple[str, ...], now: float) -> None:
        self._held = tuple(name for name in self._held or () if name not in devices)
        wish = Question(verb=Verb.LEAVE, leave=devices, why=f"{len(devices)} to give back")
        self._talk.ask(wish, now, slots=self._children.slots)

    def _left(self, asked: Question, answer: Answer, membership: Membership) -> Membership:
        if answer.outcome is Outcome.REFUSED:
            log.warning("%s are not given back: %s", ", ".join(asked.leave), answer.sentence)
        self._talk.remember(self._children.slots)
        return membership

    def _refill_spares(self, membership: Membership) -> Membership:
        """Start spares in the new place for those that were ended with the old one."""
        for _ in range(len(self._children.slots) - len(membership.alive) - len(membership.vacant)):
            if (slot := self._children.free_slot(self._record.suspect_devices)) is not None:
                membership = membership.add_spare(self._start(slot))
        return membership


def _names(devices: list[GrownDevice]) -> str:
    return f"{len(devices)} device(s) ({', '.join(device.id for device in devices)})"
