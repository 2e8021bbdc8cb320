"""What the author's ``train(ctx)`` is given.

Framework-free and small: register, steps, step, report. The loop may yield an earlier step again after a
fault, so the body takes everything from ``step`` and ``ctx.shard`` and keeps no counter of its own. Code
after the loop takes everything from the model: a shard that took over at the end has done no step. Behind
it: `step_loop`.

    def train(ctx):
        model = build(ctx.params).to(ctx.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ctx.register(model, optimizer)
        for step in ctx.steps(1000):
            loss = model(batch(step, ctx.shard, ctx.shard_count))
            optimizer.zero_grad(); loss.backward(); ctx.step(optimizer)
            ctx.report(loss=loss)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from pydantic import JsonValue
from torch import nn

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.coordination import RunStore
from airflow_gpu_provider.training.non_finite import check_loss, check_weights
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.pulse import Pulse
from airflow_gpu_provider.training.state import TrainingState
from airflow_gpu_provider.training.step_loop import StepLoop
from airflow_gpu_provider.training.telemetry import Number, Telemetry


class TrainContext:
    """The shard's view of its run."""

    def __init__(
        self,
        plan: RunPlan,
        uid: str,
        store: RunStore,
        pulse: Pulse,
        *,
        telemetry: Telemetry,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._uid = uid
        self._store = store
        self._pulse = pulse
        self._telemetry = telemetry
        self._state: TrainingState | None = None
        self._loop: StepLoop | None = None
        self._unchecked: list[tuple[int, torch.Tensor]] = []
        self.device = device
        #: of the CUDA stream that the function is on: -1 goes first, 0 is the usual one and that of a CPU
        self.stream_priority = 0

    @property
    def params(self) -> Mapping[str, JsonValue]:
        """What the operator was given for this function."""
        return MappingProxyType(self._plan.params)

    @property
    def seed(self) -> int:
        """The run's seed, equal on all shards and attempts."""
        return self._plan.seed

    @property
    def shard_count(self) -> int:
        """How many shards share the work; constant, whatever happens to processes."""
        return self._plan.shard_count

    @property
    def sync_interval(self) -> int:
        """After how many steps the shards share their state."""
        return self._plan.sync_interval

    @property
    def shard(self) -> int:
        """This shard's logical rank, known only from the loop on: a spare gets it when it takes over."""
        if self._loop is None or self._loop.rank is None:
            raise InvalidRequest(
                "ctx.shard is known only inside `for step in ctx.steps(n)`: a spare builds its model before "
                "it has a rank. Choose the shard's data inside the loop, as a function of step and "
                "ctx.shard."
            )
        return self._loop.rank

    @property
    def step_now(self) -> int | None:
        """The present step; None outside the loop."""
        return None if self._loop is None else self._loop.step

    @property
    def is_complete(self) -> bool:
        """True when the loop went through all its steps."""
        return self._loop is not None and self._loop.is_finished

    def register(self, *parts: nn.Module | torch.optim.Optimizer | torch.amp.GradScaler) -> None:
        """Say which models and optimizers are trained, once, before the loop.

        A GradScaler belongs to what shards share as well; `step` then steps through it and updates it.
        """
        models = [part for part in parts if isinstance(part, nn.Module)]
        optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        scalers = [part for part in parts if isinstance(part, torch.amp.GradScaler)]
        is_clear = len(models) + len(optimizers) + len(scalers) == len(parts) and len(scalers) <= 1
        if self._state is not None or not models or not optimizers or not is_clear:
            given = ", ".join(type(part).__name__ for part in parts) or "nothing"
            raise InvalidRequest(
                f"ctx.register({given}): call it once with all models (torch.nn.Module) and all optimizers "
                "(torch.optim.Optimizer) that are trained, and the torch.amp.GradScaler if there is one."
            )
        self._state = TrainingState(models, optimizers, next(iter(scalers), None))

    def steps(self, count: int) -> Iterator[int]:
        """Yield 0 .. count - 1; after a fault an earlier step may come again."""
        if self._state is None:
            raise InvalidRequest("Call ctx.register(model, optimizer) before ctx.steps(n).")
        if self._loop is not None:
            raise InvalidRequest(
                "ctx.steps() can be called once; put all phases of the training in one loop."
            )
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidRequest(f"ctx.steps({count!r}): give the number of steps as a whole number >= 1.")
        self._loop = StepLoop(
            self._plan,
            self._uid,
            self._store,
            self._pulse,
            telemetry=self._telemetry,
            state=self._state,
            count=count,
        )
        return self._steps(self._loop)

    def _steps(self, loop: StepLoop) -> Iterator[int]:
        while (step := loop.next_step(self._check_window)) is not None:
            yield step

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer; with sync_interval=1 its gradients are averaged over the shards first."""
        if self._loop is None:
            raise InvalidRequest("ctx.step(optimizer) belongs inside `for step in ctx.steps(n)`.")
        if self._plan.sync_interval == 1:
            self._check_losses()
        self._loop.step_optimizer(optimizer)

    def report(self, *, loss: Number, samples: int | None = None, **metrics: Number) -> None:
        """Record the loss and other numbers of this step; ``samples``: how many this shard has trained on.

        A loss that is not finite ends the run, unless the operator has `allow_non_finite_loss=True`.
        """
        if self._loop is None or self._loop.rank is None:
            raise InvalidRequest("ctx.report(loss=...) belongs inside `for step in ctx.steps(n)`.")
        step = self._loop.step
        if not self._plan.allow_non_finite_loss:
            self._check_loss(step, loss)
        if samples is not None:
            self._telemetry.meter.add_samples(samples)
        self._telemetry.report(self._loop.rank, step, {"loss": loss, **metrics})

    def _check_loss(self, step: int, loss: Number) -> None:
        if isinstance(loss, torch.Tensor) and loss.device.type != "cpu":
            self._unchecked.append((step, loss.detach()))  # reading it now would wait for the device
        else:
            number = loss.item() if isinstance(loss, torch.Tensor) else float(loss)
            check_loss(number, step=step, shard=self.shard)

    def _check_window(self) -> None:
        """Look before a window is shared: afterwards all shards would hold the same damage, and be named."""
        self._check_losses()
        if self._plan.allow_non_finite_loss or self._plan.sync_interval == 1 or self._state is None:
            return
        weights = [p for model in self._state.models for p in model.parameters()]
        check_weights(weights, step=self.step_now, shard=self.shard, on=self.device)

    def _check_losses(self) -> None:
        if self._unchecked:
            steps = [step for step, _ in self._unchecked]
            losses = torch.stack([loss.reshape(()) for _, loss in self._unchecked]).tolist()
            self._unchecked.clear()
            for step, loss in zip(steps, losses, strict=True):
                check_loss(loss, step=step, shard=self.shard)
