"""The small training that the benchmarks of `training` run, which keeps count of its own samples.

A buffer of the model counts for each step and shard how often its samples were seen. It is rolled back,
averaged and sent to a newcomer like the weights, so it tells what went into the weights that survived.
A pause stands in for a device that computes, so that two cores can carry several shards.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

BATCH = 32
FEATURES = 16


class CountedNet(nn.Module):
    """A net with the count of its samples."""

    seen: torch.Tensor

    def __init__(self, steps: int, shards: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
        self.register_buffer("seen", torch.zeros(steps, shards, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def batch(step: int, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of a step and shard: a function of both and of nothing else."""
    generator = torch.Generator().manual_seed(1_000_003 * step + shard)
    x = torch.randn(BATCH, FEATURES, generator=generator)
    return x, (x[:, :8].sum(1, keepdim=True) * 0.5).sin()


def train(ctx: Any) -> dict[str, Any]:
    """Train ``steps`` steps; ``oom_file`` of the parameters is the place where a shortage is ordered."""
    steps, oom_file = ctx.params["steps"], Path(ctx.params["oom_file"])
    model = CountedNet(steps, ctx.shard_count).to(ctx.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ctx.register(model, optimizer)
    for step in ctx.steps(steps):
        if oom_file.exists() and oom_file.read_text() == str(ctx.shard):
            run_out_of_memory(oom_file)
        x, y = batch(step, ctx.shard)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        ctx.step(optimizer)
        model.seen[step, ctx.shard] += 1
        ctx.report(loss=loss)
        time.sleep(ctx.params["pause_s"])
    return {
        "lost_samples": int((model.seen == 0).sum()) * BATCH,
        "repeated_samples": int((model.seen - 1).clamp(min=0).sum()) * BATCH,
    }


def run_out_of_memory(order: Path) -> None:
    """Ask for more than there is, once; leave behind when that was."""
    taken = order.with_suffix(".at")
    taken.with_suffix(".tmp").write_text(str(time.time()))
    os.replace(taken.with_suffix(".tmp"), taken)
    order.unlink()
    torch.empty(1 << 50, dtype=torch.uint8)
