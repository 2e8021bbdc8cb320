"""The training of the recovery benchmark as one writes it for torchft: one replica with its manager.

Started by `peers` when torchft is installed. Averages weights every few steps (not the optimizer's state,
which torchft's LocalSGD leaves apart), and notes each synchronisation that was committed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.benchmarks.training_workload import CountedNet, batch


def main(folder: Path, replica: int, replicas: int, sync_interval: int, pause_s: float) -> None:
    """Train until killed."""
    from torchft.local_sgd import LocalSGD
    from torchft.manager import Manager, WorldSizeMode
    from torchft.process_group import ProcessGroupGloo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CountedNet(1, replicas)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=replicas,
        use_async_quorum=False,
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica{replica}",
        hostname="127.0.0.1",
        timeout=timedelta(seconds=10),
    )
    step, committed = 0, manager.current_step()
    with (
        (folder / f"syncs-{os.getpid()}.jsonl").open("a", buffering=1) as syncs,
        LocalSGD(manager, model, optimizer, sync_every=sync_interval),
    ):
        while True:
            x, y = batch(step, replica)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            time.sleep(pause_s)
            if manager.current_step() != committed:
                committed = manager.current_step()
                syncs.write(json.dumps({"at": time.time(), "step": committed, "rank": replica}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
