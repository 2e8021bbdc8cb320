"""What shards share: their state every K steps, or their gradients at every step.

Both keep the loop's invariant. `StateAveraging` averages a copy and commits it with a snapshot to return to.
`GradientAveraging` (K = 1) reduces before the optimizer steps, so a reduction that fails leaves the state as
it was and no copy is needed; only buffers that the forward pass changed are put back. Next: `step_loop`
drives them.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.non_finite import are_finite, gradients_of
from airflow_gpu_provider.training.shard_group import GroupLost, ShardGroup
from airflow_gpu_provider.training.state import Flats, Snapshot, TrainingState


class Wish(IntEnum):
    """What a shard was asked for at the next synchronisation; the largest that any of them has counts."""

    GO_ON = 0
    """Nothing."""
    PAUSE = 1
    """Save and wait: ranks are handed over."""
    STOP = 2
    """Save and leave."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One round of sharing."""

    size_bytes: int
    seconds: float


class Averaging(Protocol):
    """How shards come to share one state."""

    #: what all shards have agreed on for this step
    agreed: Wish
    #: the interval from the next synchronisation on, as this shard proposes it, and as all have agreed on it;
    #: 0: it is not for this kind of averaging to change
    proposed_interval: int
    agreed_interval: int

    def step_optimizer(self, optimizer: torch.optim.Optimizer, group: ShardGroup, *, wish: Wish) -> None:
        """Do the author's optimizer step. Never raises for a lost group: the author's loop body goes on."""

    def end_step(self, group: ShardGroup, step: int, *, is_window_end: bool, wish: Wish) -> Exchange | None:
        """Share what ``step`` (from 1) has brought; None when nothing was due."""

    def commit(self, version: int, flats: Flats) -> None:
        """Remember the present state, of which ``flats`` is a copy, as the one to return to."""

    def roll_back(self) -> None:
        """Return to the last committed state."""

    @property
    def version(self) -> int | None:
        """The last committed version; None: no state yet."""


class StateAveraging:
    """Average parameters, buffers and optimizer state at the end of each window."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._snapshot: Snapshot | None = None
        self.agreed = Wish.GO_ON
        self.proposed_interval = self.agreed_interval = 0

    @property
    def version(self) -> int | None:
        """The snapshot's version."""
        return None if self._snapshot is None else self._snapshot.version

    def step_optimizer(self, optimizer: torch.optim.Optimizer, group: ShardGroup, *, wish: Wish) -> None:
        """Step with this shard's own gradients."""
        self._state.step(optimizer)

    def end_step(self, group: ShardGroup, step: int, *, is_window_end: bool, wish: Wish) -> Exchange | None:
        """Average at the end of a window."""
        group.raise_if_replaced()
        if not is_window_end:
            return None
        self._state.fill_in()
        words = group.gather([self._state.layout_digest(), int(wish), self.proposed_interval])
        if len({word[0] for word in words}) > 1:
            raise InvalidRequest(
                "Shards hold optimizer state for different parameters, so it cannot be averaged; let every "
                "window give a gradient to the same parameters."
            )
        started_at = time.monotonic()
        flats = self._state.pack(group.device)
        group.average(flats)
        self._state.unpack(flats)
        self.commit(step, flats)
        self.agreed = Wish(max(word[1] for word in words))
        self.agreed_interval = words[0][2]
        size = sum(flat.numel() * flat.element_size() for flat in flats.values())
        return Exchange(size, time.monotonic() - started_at)

    def commit(self, version: int, flats: Flats) -> None:
        """Keep the copy as the snapshot."""
        self._snapshot = self._state.snapshot(version, flats)

    def roll_back(self) -> None:
        """Restore the snapshot."""
        self._state.forget_unfinished_step()
        if self._snapshot is not None:
            self._state.restore(self._snapshot)


class GradientAveraging:
    """Reduce gradients at every step, as distributed data parallel training does."""

    def __init__(self, state: TrainingState, *, allow_non_finite: bool = False) -> None:
        if len(state.optimizers) != 1:
            raise InvalidRequest(
                f"sync_interval=1 reduces the gradients of one optimizer and {len(state.optimizers)} were "
                "registered; register one, or set sync_interval to 2 or more."
            )
        self._state = state
        # A scaler looks for itself, and leaves such a step out.
        self._is_checked = not allow_non_finite and not state.has_scaler
        self._buffers: list[torch.Tensor] = []
        self._sent: Exchange | None = None
        self._is_lost = False
        self._version: int | None = None
        self.agreed = Wish.GO_ON
        self.proposed_interval = self.agreed_interval = 0

    @property
    def version(self) -> int | None:
        """The live state's version: between two steps it is always a committed one."""
        return self._version

    def step_optimizer(self, optimizer: torch.optim.Optimizer, group: ShardGroup, *, wish: Wish) -> None:
        """Average the gradients, then step; skip the step when the group is lost."""
        if self._is_lost:
            return
        try:
            self._sent, self.agreed = self._average(optimizer, group, wish)
        except GroupLost:
            self._is_lost = True
            return
        self._state.step(optimizer)
        # Committed here, not at the end of the body: from now on the live state is the next version.
        self._version = (self._version or 0) + 1
        self._keep_buffers()

    def end_step(self, group: ShardGroup, step: int, *, is_window_end: bool, wish: Wish) -> Exchange | None:
        """Check that the author's body shared its gradients once."""
        if self._is_lost:
            raise GroupLost("the gradients of this step were not reduced")
        if self._version != step:
            raise InvalidRequest(
                f"With sync_interval=1 the loop body calls ctx.step(optimizer) exactly once; step {step - 1} "
                f"did it {(self._version or 0) - step + 1} times. To accumulate gradients, loop inside the "
                "body."
            )
        return self._sent

    def commit(self, version: int, flats: Flats) -> None:
        """Take the live state as ``version``."""
        self._version = version
        self._is_lost = False
        self._keep_buffers()

    @torch.no_grad()
    def roll_back(self) -> None:
        """Undo what the forward pass of an unfinished step did to the buffers."""
        self._state.forget_unfinished_step()
        for buffer, kept in zip(self._state.buffers(), self._buffers, strict=False):
            buffer.copy_(kept)

    def _keep_buffers(self) -> None:
        self._buffers = [buffer.detach().clone() for buffer in self._state.buffers()]

    @torch.no_grad()
    def _average(
        self, optimizer: torch.optim.Optimizer, group: ShardGroup, wish: Wish
    ) -> tuple[Exchange, Wish]:
        parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        wide = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
        # One buffer, so one round: gradients and buffers, then who has a gradient, then who wishes what.
        tensors = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        tensors += [buffer for buffer in self._state.buffers() if buffer.is_floating_point()]
        wishes = [wish is Wish.PAUSE, wish is Wish.STOP]
        said = torch.tensor([p.grad is not None for p in parameters] + wishes, dtype=wide)
        flat = torch.cat([t.reshape(-1).to(group.device, wide) for t in tensors] + [said.to(group.device)])
        started_at = time.monotonic()
        group.reduce(flat, dist.ReduceOp.SUM)
        seconds = time.monotonic() - started_at
        gradients = flat[: sum(p.numel() for p in parameters)]
        # Together, so that a device is waited for once. A sum shows what is not finite at the least cost.
        *words, total = torch.cat([flat[-len(said) :], gradients.sum().reshape(1)]).tolist()
        if self._is_checked and not math.isfinite(total) and not are_finite([gradients]):
            self._blame(tensors[: len(parameters)], group)
        flat /= group.size
        start = 0
        for index, tensor in enumerate(tensors):
            tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()
            if index < len(parameters):
                parameters[index].grad = tensor if words[index] else None
        agreed = Wish.STOP if words[-1] else Wish.PAUSE if words[-2] else Wish.GO_ON
        return Exchange(flat.numel() * flat.element_size(), seconds), agreed

    def _blame(self, own: list[torch.Tensor], group: ShardGroup) -> NoReturn:
        """Find out whose gradients spoil the average: those shards raise NonFiniteLoss, the others wait."""
        rows = group.gather([int(are_finite(own))])
        spoilt = [rank for rank, (is_finite,) in enumerate(rows) if not is_finite]
        if not spoilt or group.rank in spoilt:
            raise gradients_of(spoilt, self._version or 0)
        raise GroupLost("the gradients of another shard are not finite")
