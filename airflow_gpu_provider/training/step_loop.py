"""The protocol behind ``for step in ctx.steps(n)``: when to share, roll back, join, save and leave.

Invariant: the shard can always return to the last state that all shards shared. A generation that ends in the
middle is answered by rolling back to it, taking the newest version any member holds and doing the steps since
again; a shard that did not fail is never restarted. Next: `context` is its face to the author.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from pydantic import TypeAdapter

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.averaging import (
    Averaging,
    Exchange,
    GradientAveraging,
    StateAveraging,
    Wish,
)
from airflow_gpu_provider.training.coordination import Control, RunStore
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.pulse import Phase, Pulse
from airflow_gpu_provider.training.randomness import seed_everything
from airflow_gpu_provider.training.saving import Saving
from airflow_gpu_provider.training.shard_group import GroupLost, ShardGroup
from airflow_gpu_provider.training.state import Layout, Scalars, TrainingState
from airflow_gpu_provider.training.sync_schedule import SyncSchedule
from airflow_gpu_provider.training.telemetry import Telemetry, gradient_norm

_FRESH = -1  #: the version of a process that has no state yet
_EVENT_EVERY_S = 0.5
_LAYOUT_WORD = TypeAdapter(tuple[Layout, Scalars, list[tuple[int, int]]])


class Leaving(BaseException):
    """The shard leaves as it should; no Exception, so that the author's code does not catch it."""


class StepLoop:
    """One shard's way through ``count`` steps."""

    def __init__(
        self,
        plan: RunPlan,
        uid: str,
        store: RunStore,
        pulse: Pulse,
        *,
        telemetry: Telemetry,
        state: TrainingState,
        count: int,
    ) -> None:
        self._plan = plan
        self._uid = uid
        self._store = store
        self._pulse = pulse
        self._telemetry = telemetry
        self._state = state
        self._averaging: Averaging = (
            GradientAveraging(state, allow_non_finite=plan.allow_non_finite_loss)
            if plan.sync_interval == 1
            else StateAveraging(state)
        )
        self._group = ShardGroup(uid, store, pulse, plan, meter=telemetry.meter)
        self._schedule = SyncSchedule(plan.sync_interval, plan.network.sync_schedule)
        self._saving = Saving(plan, store, state, tell=pulse.tell)
        self._window_started_at = time.monotonic()
        self._window_version = _FRESH
        self._last_event_at = 0.0
        self._is_in_body = False
        self.count = count
        self.step = 0
        self.rank: int | None = None
        self.is_finished = False

    @property
    def version(self) -> int:
        """The last step whose state all shards shared."""
        version = self._averaging.version
        return _FRESH if version is None else version

    def next_step(self, check: Callable[[], None]) -> int | None:
        """Return the step to do next, possibly an earlier one again, or None when all are done and saved.

        ``check`` is called before a window's result is shared; it raises when it must not be.
        """
        while True:
            try:
                if self._is_in_body:
                    self._is_in_body = False
                    self._end_step(check)
                if self._group.generation < 0 or self._pulse.has_moved_on(self._group.generation):
                    self._join()
                if self.version >= self.count:
                    self._finish()
                    return None
            except GroupLost:
                self._await_next_generation()
                continue
            self._is_in_body = True
            self._pulse.step, self._pulse.phase = self.step, Phase.COMPUTING
            seed_everything(self._plan.seed, self.step, self.rank or 0)
            return self.step

    def step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Do the author's optimizer step."""
        self._averaging.step_optimizer(optimizer, self._group, wish=self._wish)

    @property
    def _wish(self) -> Wish:
        control = self._pulse.control
        if control is None:
            return Wish.GO_ON
        return Wish.STOP if control.stop else Wish.PAUSE if control.pause else Wish.GO_ON

    # -- the end of a step ---------------------------------------------------------------------------------

    def _end_step(self, check: Callable[[], None]) -> None:
        done = self.step + 1
        is_window_end = self._schedule.is_due(done, self.version) or done == self.count
        if is_window_end:
            check()
            self._pulse.phase = Phase.WAITING
            if self._plan.sync_interval > 1:
                self._telemetry.meter.arrive()
        window_s = time.monotonic() - self._window_started_at
        wanted = self._pulse.control.sync_interval if self._pulse.control is not None else 0
        self._averaging.proposed_interval = self._schedule.proposal(done, wanted, self.version)
        exchange = self._averaging.end_step(self._group, done, is_window_end=is_window_end, wish=self._wish)
        self.step = done
        if exchange is None:
            return
        self._pulse.version = self.version
        self._telemetry.meter.end(self.version - self._window_version)
        if self._schedule.agree(self.version, self._averaging.agreed_interval):
            self._note_schedule()
        self._tell_sync(exchange, window_s)
        self._save_when_due()
        self._begin_window()

    def _begin_window(self) -> None:
        self._window_started_at = time.monotonic()
        self._window_version = self.version
        self._telemetry.meter.begin()

    def _note_schedule(self) -> None:
        if self._group.rank == 0:
            self._saving.note_schedule(self._schedule.entries)

    def _tell_sync(self, exchange: Exchange, window_s: float) -> None:
        if time.monotonic() - self._last_event_at < _EVENT_EVERY_S and self.version < self.count:
            return
        self._last_event_at = time.monotonic()
        self._telemetry.event(
            "sync",
            shard=self._group.rank,
            step=self.step,
            generation=self._group.generation,
            sync_s=round(exchange.seconds, 6),
            window_s=round(window_s, 6),
            bytes=exchange.size_bytes,
            interval=self._schedule.interval_after(self.step),
            **self._group.latency(),
            **gradient_norm(self._state.optimizers),
        )

    def _save_when_due(self) -> None:
        agreed = self._averaging.agreed if self.version < self.count else Wish.GO_ON
        if self._group.rank == 0:
            if agreed is not Wish.GO_ON:
                self._saving.save(self.version)
            elif self.version < self.count:
                self._saving.after_sync(self.version)
        if agreed is Wish.STOP:
            raise Leaving("stopped at a synchronisation")
        if agreed is Wish.PAUSE:
            self._pause()

    def _pause(self) -> None:
        """Wait in the state that all shards share until ranks have been handed over. Raises GroupLost."""
        self._pulse.phase = Phase.WAITING
        self._store.put(f"paused/{self._group.generation}/{self._uid}", True)
        while True:
            self._group.raise_if_replaced()
            if self._wish is Wish.STOP:
                raise Leaving("stopped while ranks were handed over")
            time.sleep(0.01)

    # -- joining a generation ------------------------------------------------------------------------------

    def _join(self) -> None:
        control = self._await_rank()
        if control.finishing:
            self._adopt_final(control.members[self._uid])
            return
        self._averaging.roll_back()
        self._pulse.phase = Phase.WAITING
        self._group.join(control)
        self._agree_on_state()
        self.rank = self._group.rank
        self._begin_window()
        self._last_event_at = 0.0  # the first synchronisation of a generation is always told
        self._telemetry.event("joined", shard=self.rank, step=self.version, generation=self._group.generation)

    def _await_rank(self) -> Control:
        """Wait warm until there is a rank for this process. Raise Leaving when the run stops before."""
        while (control := self._pulse.control) is None or self._uid not in control.members:
            if control is not None and (control.stop or self.rank is not None):
                raise Leaving("a spare that was not needed" if self.rank is None else "the rank is another's")
            if control is not None and self._pulse.phase is Phase.STARTING:
                self._state.materialise()  # imports and compiles what the first step would have to
                self._pulse.phase = Phase.PARKED
            self._pulse.wait_for_word()
        return control

    def _agree_on_state(self) -> None:
        """Give every member the newest version that any of them holds."""
        own = self.version
        rows = self._group.gather([own, self.count])
        counts = sorted({row[1] for row in rows})
        if len(counts) > 1:
            raise InvalidRequest(
                f"Shards call ctx.steps() with different numbers: {counts}; take the number from ctx.params, "
                "not from the shard's data."
            )
        if max(row[0] for row in rows) == _FRESH:
            if self._group.rank == 0:
                own = self._load_newest()
            rows = self._group.gather([own, self.count])
        newest = max(row[0] for row in rows)
        root = next(rank for rank, row in enumerate(rows) if row[0] == newest)
        self._take_layout(root)
        self._note_schedule()
        flats = self._state.pack(self._group.device)
        for flat in flats.values():
            self._group.broadcast(flat, root)
        self._state.unpack(flats)
        self._averaging.commit(newest, flats)
        self.step = self._pulse.version = newest

    def _take_layout(self, root: int) -> None:
        key = f"layout/{self._group.generation}"
        if self._group.rank == root:
            word = [self._state.layout(), self._state.scalars(), self._schedule.entries]
            self._store.put(key, word)  # type: ignore[arg-type]
            return
        self._group.wait_for([key])
        layout, scalars, schedule = _LAYOUT_WORD.validate_python(self._store.get(key))
        self._state.align(layout, scalars)
        self._schedule.take(schedule)

    def _load_newest(self) -> int:
        self._store.put("step_count", self.count)
        found = min(self._saving.load_newest(), self.count)
        self._schedule.take(self._saving.sync_schedule)
        return found

    def _await_next_generation(self) -> None:
        self._group.leave()
        self._pulse.phase = Phase.WAITING
        while not self._pulse.has_moved_on(self._group.generation):
            time.sleep(0.01)

    # -- the end -------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Save the final state once, and leave the loop together."""
        if self.rank == 0 and not self._saving.is_final_saved:
            self._pulse.phase = Phase.FINISHING
            self._saving.save_final(self.count)
        while not self._saving.is_final_saved:
            self._group.raise_if_replaced()
            time.sleep(0.01)
        self._pulse.phase = Phase.FINISHING
        self._pulse.step = self.count
        self.is_finished = True

    def _adopt_final(self, rank: int) -> None:
        """Take over from a shard that was lost after the last step: nobody is left in the loop to join."""
        self._saving.load_final()
        self.rank = rank
        self.step = self._pulse.version = self.count
        self._averaging.commit(self.count, self._state.pack(self._group.device))
