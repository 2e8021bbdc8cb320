"""Fine-tune the language model in shards: the function that `DistributedTrainingOperator` runs.

Everything in the loop is a function of ``step`` and ``ctx.shard`` (batch, learning rate), so a step that
comes again after a fault gives the same result, whoever does it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workloads.language_model.model import ByteTransformer, load_model
from workloads.language_model.windows import TextWindows

if TYPE_CHECKING:
    from airflow_gpu_provider.training.context import TrainContext

_WARM_UP_STEPS = 20
_VALIDATION_WINDOWS = 64


def train(ctx: TrainContext) -> dict[str, float | int]:
    """Train ``params.steps`` steps; return the loss on held-out text before and after, in nats a byte."""
    dataset = Path(str(ctx.params["dataset"]))
    steps = int(str(ctx.params.get("steps", 300)))
    batch_size = int(str(ctx.params.get("batch_size", 8)))
    learning_rate = float(str(ctx.params.get("learning_rate", 2e-3)))

    model = load_model(Path(str(ctx.params["pretrained_model"]))).to(ctx.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    ctx.register(model, optimizer)
    text = TextWindows(dataset / "train.bin", model.size.context)
    held_out = (
        TextWindows(dataset / "valid.bin", model.size.context).evenly(_VALIDATION_WINDOWS).to(ctx.device)
    )
    before = _evaluate(model, held_out)

    for step in ctx.steps(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * _schedule(step, steps)
        loss = model.loss(text.batch(batch_size, seed=ctx.seed, step=step, shard=ctx.shard).to(ctx.device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ctx.step(optimizer)
        ctx.report(loss=loss, learning_rate=optimizer.param_groups[0]["lr"])

    return {"loss_before": before, "loss_after": _evaluate(model, held_out), "steps": steps}


def _schedule(step: int, steps: int) -> float:
    """Warm up, then fall along a cosine to a tenth."""
    if step < _WARM_UP_STEPS:
        return (step + 1) / _WARM_UP_STEPS
    done = (step - _WARM_UP_STEPS) / max(1, steps - _WARM_UP_STEPS)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def _evaluate(model: ByteTransformer, windows: torch.Tensor) -> float:
    model.eval()
    loss = model.loss(windows).item()
    model.train()
    return loss
