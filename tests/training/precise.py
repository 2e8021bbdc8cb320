"""A training in half precision, compiled: what autocast, GradScaler and torch.compile need of the loop."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from tests.training.entrypoints import batch


def train(ctx: Any) -> dict[str, Any]:
    """Train as ``params`` say; the scale of fp16 begins so high that the first steps are left out."""
    half = torch.float16 if ctx.params["half"] == "float16" else torch.bfloat16
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, enabled=half is torch.float16)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(ctx.device)
    compiled = torch.compile(net, backend="aot_eager")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    ctx.register(compiled, optimizer, scaler)
    skipped = 0
    for step in ctx.steps(20):
        x, y = batch(step, ctx.shard)
        with torch.autocast("cpu", dtype=half):
            loss = nn.functional.mse_loss(compiled(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer) if scaler.is_enabled() and ctx.sync_interval > 1 else None
        before = scaler.get_scale()
        ctx.step(optimizer)
        skipped += scaler.get_scale() < before
        ctx.report(loss=loss)
        time.sleep(ctx.params.get("pause_s", 0.0))
    return {"scale": scaler.get_scale(), "skipped": skipped}
