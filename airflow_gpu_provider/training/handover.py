"""Ranks that go to other places without a loss: the planned take-over.

Processes are started in the new places and wait warm. Then all shards pause at a synchronisation, where every
one of them holds the same state, the newcomers take the ranks in the next generation, and those who had them
leave. So no step is done twice. Invariant: the old holder of a rank is gone before its place is given up, and
a newcomer that is lost before takes nothing with it. Driven by `growth`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

from airflow_gpu_provider.training.children import Children
from airflow_gpu_provider.training.coordination import RunStore
from airflow_gpu_provider.training.fence import Fence
from airflow_gpu_provider.training.liveness import Liveness
from airflow_gpu_provider.training.membership import Membership
from airflow_gpu_provider.training.plan import Slot


class Stage(str, Enum):
    """How far a handover is."""

    WARMING = "warming"
    """The newcomers import and build their models; training goes on."""
    PAUSING = "pausing"
    """The shards stop at their next synchronisation."""
    LEAVING = "leaving"
    """The newcomers train; those who had their ranks end."""
    DONE = "done"
    """Nothing runs in the old places."""
    FAILED = "failed"
    """A newcomer was lost: the ranks stay where they were."""


class Handover:
    """One handover of some ranks."""

    def __init__(
        self,
        children: Children,
        liveness: Liveness,
        fence: Fence,
        store: RunStore,
        *,
        leave_within_s: float,
        warm_within_s: float,
    ) -> None:
        self._children = children
        self._liveness = liveness
        self._fence = fence
        self._store = store
        self._leave_within_s = leave_within_s
        self._warm_within_s = warm_within_s
        self._deadline = 0.0
        self._leaving: tuple[str, ...] = ()
        self.newcomers: dict[int, str] = {}  #: by the rank that each is to take
        self.stage = Stage.WARMING

    @property
    def wants_pause(self) -> bool:
        """True while the shards should stop at a synchronisation."""
        return self.stage is Stage.PAUSING

    def begin(
        self, places: Mapping[int, Slot], start: Callable[[Slot], str], membership: Membership, now: float
    ) -> Membership:
        """Start a process in each place and return the membership in which they wait."""
        for rank, slot in places.items():
            self.newcomers[rank] = start(slot)
            membership = membership.add_spare(self.newcomers[rank])
        self._deadline = now + self._warm_within_s
        return membership

    def step(self, membership: Membership, now: float) -> Membership:
        """Do what is due and return the membership after it."""
        if self.stage is Stage.LEAVING:
            self._see_off(now)
        elif self._is_broken(membership) or (self.stage is Stage.WARMING and now > self._deadline):
            return self._retreat(membership)
        elif self.stage is Stage.WARMING:
            waiting = self._waiting(membership)
            if not waiting:
                self.stage = Stage.LEAVING  # all of them have taken ranks that were vacant
            elif waiting <= self._liveness.parked():
                self.stage = Stage.PAUSING
        elif self.stage is Stage.PAUSING and self._have_paused(membership):
            return self._take_over(membership, now)
        return membership

    def call_off(self, membership: Membership) -> Membership:
        """Let every rank stay where it is, as long as none has been handed over."""
        is_open = self.stage in (Stage.WARMING, Stage.PAUSING)
        return self._retreat(membership) if is_open else membership

    def _waiting(self, membership: Membership) -> set[str]:
        """Return the newcomers without a rank: one may have taken its own already, which was vacant."""
        return set(self.newcomers.values()) - membership.members.keys()

    def _is_broken(self, membership: Membership) -> bool:
        return not set(self.newcomers.values()) <= set(membership.alive)

    def _have_paused(self, membership: Membership) -> bool:
        paused = [f"paused/{membership.generation}/{uid}" for uid in membership.members]
        return membership.is_complete and (not self._waiting(membership) or self._store.has(paused))

    def _take_over(self, membership: Membership, now: float) -> Membership:
        waiting = self._waiting(membership)
        taking = {rank: uid for rank, uid in self.newcomers.items() if uid in waiting}
        self._leaving = tuple(uid for uid, rank in membership.members.items() if rank in taking)
        self.stage, self._deadline = Stage.LEAVING, now + self._leave_within_s
        return membership.hand_over(taking) if taking else membership.next()

    def _see_off(self, now: float) -> None:
        is_late = now > self._deadline
        if is_late:
            self._fence.shut_out(self._leaving)
        if is_late or all(self._children.exit_code(uid) is not None for uid in self._leaving):
            for uid in self._leaving:
                self._liveness.forget(uid)
            self.stage = Stage.DONE

    def _retreat(self, membership: Membership) -> Membership:
        """Let every rank be in its old place: a vacant one is filled there."""
        has_paused = self.stage is Stage.PAUSING
        self.stage = Stage.FAILED
        self._fence.shut_out(set(self.newcomers.values()) & set(membership.alive))
        membership = membership.lose(frozenset(self.newcomers.values()))
        # Those who have paused wait for the next generation.
        return membership.next() if has_paused and membership.is_complete else membership
