"""What authors do wrong, each as short as it can be."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


def loop(ctx: Any, steps: int = 10) -> Any:
    """Yield the steps of a training of nothing."""
    net = nn.Linear(1, 1)
    ctx.register(net, torch.optim.SGD(net.parameters(), lr=0.1))
    yield from ctx.steps(steps)


def raise_everywhere(ctx: Any) -> None:
    for step in loop(ctx):
        if step == ctx.params["at"]:
            print("no newline at the end", end="")
            time.sleep(0.3 * (1 - ctx.shard))  # shard 1 is the first
            raise ValueError(f"shard {ctx.shard} cannot go on")


def never_join(ctx: Any) -> None:
    if ctx._uid == "u1":
        time.sleep(3600)
    for _ in loop(ctx):
        pass


def exit_early(ctx: Any) -> None:
    for step in loop(ctx):
        if step == 3:
            sys.exit(0)


def return_at_once(ctx: Any) -> None:
    ctx.register  # noqa: B018 - and nothing else


def return_a_tensor(ctx: Any) -> torch.Tensor:
    for _ in loop(ctx):
        pass
    return torch.zeros(1)


def leave_a_child(ctx: Any) -> None:
    """Start a process in shard 1 that nobody ends, and die."""
    for step in loop(ctx, 60):
        if step == 15 and ctx.shard == 1 and not (note := Path(ctx.params["note"])).exists():
            note.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
            os._exit(9)
        time.sleep(0.01)
