"""One training in three forms: in the product's shards, in a bare torch.distributed loop, and in DDP.

Same model, batches, optimizer and threads; only what shares the state differs. Each returns the seconds a
step took, one number for each block of steps, with the synchronisation at the block's end in it. The bare
loop and DDP run as ``python -m tests.benchmarks.overhead_workload FORM SHARDS PORT``.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

BATCH = 64
WIDTH = 512
BLOCK = 100  #: steps, and the distance of two synchronisations
BLOCKS = 5
STEPS = BLOCK * BLOCKS


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model, a million parameters, and its optimizer."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, step: int, shard: int) -> torch.Tensor:
    """Return the loss of a step's batch."""
    generator = torch.Generator().manual_seed(1_000_003 * step + shard)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return nn.functional.mse_loss(model(x), x[:, :1].sin())


class Blocks:
    """Times blocks of steps, one number for a step.

    Wall clock; processor time of the loop's body, which is the same in all forms; and of all else that the
    process does. The last two have the same neighbours, so their ratio is little disturbed by them.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[float, float, float]] = []
        self._body_s = self._entered_at = 0.0

    def enter(self, step: int) -> None:
        """Note that a body begins, and with every block's first one that the block before has ended."""
        if step % BLOCK == 0:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            self._marks.append((time.perf_counter(), self._body_s, usage.ru_utime + usage.ru_stime))
        self._entered_at = time.thread_time()

    def leave(self) -> None:
        """Note that a body has ended."""
        self._body_s += time.thread_time() - self._entered_at

    def result(self) -> dict[str, list[float]]:
        """Return the times without the first block, which warms up."""
        pairs = list(zip(self._marks[1:], self._marks[2:], strict=False))
        wall, body, cpu = ([(b[i] - a[i]) / BLOCK for a, b in pairs] for i in (0, 1, 2))
        return {"wall_s": wall, "body_cpu_s": body, "cpu_s": cpu}


def train(ctx: Any) -> dict[str, list[float]]:
    """Train as a user of the product does."""
    model, optimizer = build()
    ctx.register(model, optimizer)
    blocks = Blocks()
    for step in ctx.steps(STEPS):
        blocks.enter(step)
        loss = loss_of(model, step, ctx.shard)
        optimizer.zero_grad()
        loss.backward()
        ctx.step(optimizer)
        blocks.leave()
        ctx.report(loss=loss)
    return blocks.result()


def train_bare(rank: int) -> dict[str, list[float]]:
    """Average weights and moments every block by hand, with nothing to help when a process is lost."""
    model, optimizer = build()
    blocks = Blocks()
    for step in range(STEPS):
        blocks.enter(step)
        loss = loss_of(model, step, rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        blocks.leave()
        if (step + 1) % BLOCK == 0:
            average(model, optimizer)
    return blocks.result()


@torch.no_grad()
def average(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Average in one buffer."""
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    tensors = [*model.parameters(), *moments]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def train_ddp(rank: int) -> dict[str, list[float]]:
    """Reduce gradients at every step with torch's own DDP."""
    model, optimizer = build()
    parallel = nn.parallel.DistributedDataParallel(model)
    blocks = Blocks()
    for step in range(STEPS):
        blocks.enter(step)
        loss = loss_of(parallel, step, rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        blocks.leave()
    return blocks.result()


def main(form: str, shards: int, port: int) -> None:
    """Run all ranks, forked like the product's shards; the first prints its times."""
    others = []
    rank = 0
    for number in range(1, shards):
        if (pid := os.fork()) == 0:
            rank = number
            break
        others.append(pid)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=shards)
    times = {"bare": train_bare, "ddp": train_ddp}[form](rank)
    if rank == 0:
        print(json.dumps(times), flush=True)
        for pid in others:
            os.waitpid(pid, 0)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
