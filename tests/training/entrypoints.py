"""Small trainings that the tests run in real processes."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

#: memory that a training has taken for good
TAKEN: list[torch.Tensor] = []


def batch(step: int, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * step + shard)
    x = torch.randn(32, 16, generator=generator)
    return x, (x[:, :8].sum(1, keepdim=True) * 0.5).sin()


def model() -> nn.Module:
    # Dropout and batch norm: random numbers and buffers have to survive a takeover as well.
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))


def cut_network() -> bool:
    """Break every connection to other shards, as a failing network does; the one to the store stays."""
    store_port = int(os.environ["AGP_STORE"].rsplit(":", 1)[1])
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(name)))
            if connection.getpeername()[1] != store_port:
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        except OSError:
            continue  # not a connected socket
    return True


def limit_files(step: int, begin: int = -1, end: int = -1) -> None:
    """Let the system refuse larger files to this process from one step to another, as a full disk does."""
    if step in (begin, end):
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192 if step == begin else hard, hard))


def need_memory(step: int, params: dict[str, Any]) -> None:
    """Take memory for good, or do what PyTorch does when it may not have as much."""
    needed_mib = params.get("take_mib", 0)
    if step == params.get("take_memory_at"):
        TAKEN.append(torch.ones(needed_mib * 2**18))
    limit = int(os.environ.get("GPU_MEMORY_LIMIT_MIB", needed_mib))
    if step == params.get("out_of_memory_at") and limit < needed_mib:
        raise torch.OutOfMemoryError(f"CUDA out of memory. {needed_mib} MiB are needed, {limit} allowed")


def spoil_gradient(net: nn.Module, here: bool) -> None:
    for parameter in list(net.parameters())[: int(here)]:
        parameter.grad = torch.full_like(parameter, float("inf"))


def tell_step(words: str, params: dict[str, Any]) -> None:
    """Add a line to a file of all shards."""
    if "tell_file" in params:
        with open(params["tell_file"], "a") as file:
            file.write(f"{words}\n")


def wait_while_late(params: dict[str, Any]) -> None:
    """Take long to build the model, for as long as a file exists."""
    while "late_file" in params and os.path.exists(params["late_file"]):
        time.sleep(0.05)


def pause_s(params: dict[str, Any]) -> float:
    """Return how long to wait between two steps: not at all once a file says to hurry."""
    is_hurried = "hurry_file" in params and os.path.exists(params["hurry_file"])
    return 0.0 if is_hurried else float(params.get("pause_s", 0.01))


def wait_for_file(step: int, params: dict[str, Any]) -> None:
    """Wait at a step until a file exists."""
    while step == params.get("hold_at") and not os.path.exists(params["hold_file"]):
        time.sleep(0.05)


def train(ctx: Any) -> dict[str, Any]:
    """Train as ``params`` say: ``steps``, ``pause_s`` between them, and which mistake to make where."""
    net = model().to(ctx.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    wait_while_late(ctx.params)
    ctx.register(net, optimizer)
    was_cut = False
    for step in ctx.steps(ctx.params.get("steps", 60)):
        x, y = batch(step, ctx.shard)
        tell_step(f"{step}/{ctx.shard}", ctx.params)
        loss = nn.functional.mse_loss(net(x), y)
        if ctx.shard == 1 and step == ctx.params.get("raise_at"):
            raise KeyError("no such column: price")
        if ctx.shard == 1 and step == int(ctx.params.get("die_at", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        if ctx.shard == 1 and step == ctx.params.get("cut_network_at") and not was_cut:
            was_cut = cut_network()
        if ctx.shard == 1 and step == ctx.params.get("nan_at"):
            loss = loss * float("nan")
        if step == ctx.params.get("report_nan_at"):
            ctx.report(loss=float("nan"))
        if ctx.shard == 0:
            limit_files(step, *ctx.params.get("disk_full", ()))
            need_memory(step, ctx.params)
        optimizer.zero_grad()
        loss.backward()
        spoil_gradient(net, ctx.shard == 1 and step == ctx.params.get("nan_gradient_at"))
        ctx.step(optimizer)
        ctx.report(loss=loss, lr=0.01, samples=len(x))
        time.sleep(pause_s(ctx.params) * (ctx.params.get("slow", 1) if ctx.shard == 1 else 1))
        if step == ctx.params.get("sleep_at") and ctx.shard == 0:
            time.sleep(6)
        wait_for_file(step, ctx.params)
    if "pause_after_s" in ctx.params:
        time.sleep(ctx.params["pause_after_s"])
    # Not the loop's `loss`: a shard that took over after the last step has done none.
    net.eval()
    x, y = batch(0, 0)
    return {"loss": nn.functional.mse_loss(net(x), y).item(), "shard": ctx.shard}


def tell_devices(ctx: Any) -> None:
    """Write what this shard sees of the machine's devices into a file of its own."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    ctx.register(net, optimizer)
    for _ in ctx.steps(1):
        seen = {name: value for name, value in os.environ.items() if "DEVICES" in name or "LIMIT" in name}
        Path(ctx.params["folder"], f"{ctx.shard}.json").write_text(json.dumps(seen))
        ctx.step(optimizer)


def train_and_break(ctx: Any) -> None:
    """Leave the loop before its end."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    ctx.register(net, optimizer)
    for step in ctx.steps(60):
        if step == 3:
            break
