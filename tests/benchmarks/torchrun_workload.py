"""The training of the recovery benchmark as one writes it for torchrun: state comes back from a file.

Started by `peers` through ``torchrun``. Averages every few steps, saves each shared state, and notes when it
shared one; after a fault torchrun starts it anew in every process and it loads the file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.benchmarks.training_workload import CountedNet, batch


def main(folder: Path, steps: int, sync_interval: int, pause_s: float) -> None:
    """Train to the end, from the newest saved state."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = CountedNet(steps, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = load(folder, model, optimizer)
    with (folder / f"syncs-{os.getpid()}.jsonl").open("a", buffering=1) as syncs:
        while step < steps:
            x, y = batch(step, rank)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            time.sleep(pause_s)
            if step % sync_interval == 0:
                average(model, optimizer)
                syncs.write(json.dumps({"at": time.time(), "step": step, "rank": rank}) + "\n")
                if rank == 0:
                    save(folder, model, optimizer, step)


@torch.no_grad()
def average(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Average weights and moments."""
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    for tensor in (*model.parameters(), *moments):
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Replace the saved state at once."""
    contents = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(contents, folder / "state.tmp")
    (folder / "state.tmp").replace(folder / "state.pt")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the step of the saved state, 0 when there is none."""
    if not (folder / "state.pt").exists():
        return 0
    contents = torch.load(folder / "state.pt", weights_only=True)
    model.load_state_dict(contents["model"])
    optimizer.load_state_dict(contents["optimizer"])
    return int(contents["step"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
