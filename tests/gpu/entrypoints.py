"""Trainings on a device."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


def batch(step: int, shard: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * step + shard)
    x = torch.randn(64, 16, generator=generator)
    return x.to(device), (x[:, :8].sum(1, keepdim=True) * 0.5).sin().to(device)


def train(ctx: Any) -> dict[str, Any]:
    """Train on the one device that is visible, in half precision if asked; say which device that is."""
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(ctx.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    half = bool(ctx.params.get("half"))
    scaler = torch.amp.GradScaler("cuda", enabled=half)
    ctx.register(net, optimizer, scaler)
    for step in ctx.steps(ctx.params.get("steps", 60)):
        x, y = batch(step, ctx.shard, ctx.device)
        with torch.autocast("cuda", dtype=torch.float16, enabled=half):
            loss = nn.functional.mse_loss(net(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        ctx.step(optimizer)
        ctx.report(loss=loss)
        time.sleep(ctx.params.get("pause_s", 0.02))
    return {
        "devices": torch.cuda.device_count(),
        "uuid": f"GPU-{torch.cuda.get_device_properties(0).uuid}",
        "is_on_device": all(parameter.is_cuda for parameter in net.parameters()),
    }


def take_too_much(ctx: Any) -> None:
    """Ask for more memory than this process may have, long before the device has none left."""
    net = nn.Linear(1, 1).to(ctx.device)
    ctx.register(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in ctx.steps(10):
        torch.empty(2 * 2**30, dtype=torch.uint8, device=ctx.device)
