"""One training in three forms: in the product's shards, in a bare torch.distributed loop, and in DDP.

Same model, batches, optimizer and threads; only what shares the state differs. Each trains until it is ended
and counts its steps in a file that the benchmark reads. The bare loop and DDP run as
``python -m tests.benchmarks.overhead_workload FORM SHARDS PORT COUNTER``.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from airflow_gpu_provider.training.parenthood import end_with_parent

BATCH = 64
WIDTH = 512
BLOCK = 100  #: steps between two synchronisations
_FOR_EVER = 10_000_000


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


class Counter:
    """A number in a file, written by one process and read by another without any call to the kernel."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)

    def write(self, number: int) -> None:
        self._memory[:] = number.to_bytes(8, "little")

    def read(self) -> int:
        return int.from_bytes(self._memory[:], "little")


def train(ctx: Any) -> None:
    """Train as a user of the product does."""
    model, optimizer = build()
    ctx.register(model, optimizer)
    counter = Counter(Path(ctx.params["counter"]))
    for step in ctx.steps(_FOR_EVER):
        if ctx.shard == 0:
            counter.write(step)
        loss = loss_of(model, step, ctx.shard)
        optimizer.zero_grad()
        loss.backward()
        ctx.step(optimizer)
        ctx.report(loss=loss)


def train_plain(form: str, rank: int, counter: Counter) -> None:
    """Train with nothing to help when a process is lost.

    "bare" averages weights and moments every block by hand, "ddp" reduces gradients at every step.
    """
    model, optimizer = build()
    trained = nn.parallel.DistributedDataParallel(model) if form == "ddp" else model
    for step in range(_FOR_EVER):
        if rank == 0:
            counter.write(step)
        loss = loss_of(trained, step, rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if form == "bare" and (step + 1) % BLOCK == 0:
            average(model, optimizer)


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


def main(form: str, shards: int, port: int, counter: Path) -> None:
    """Run all ranks, forked like the product's shards."""
    # Without a benchmark that reads the counter the loop would train for ever.
    end_with_parent(os.getppid())
    rank, parent = 0, os.getpid()
    for number in range(1, shards):
        if os.fork() == 0:
            rank = number
            end_with_parent(parent)
            break
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=shards)
    train_plain(form, rank, Counter(counter))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
