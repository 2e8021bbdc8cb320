"""What training in shards must give, computed in one process without any of the machinery.

Models side by side, averaged by hand: the weights of a real run have to equal these bit by bit, with and
without failures.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from airflow_gpu_provider.training.randomness import seed_everything
from airflow_gpu_provider.training.state import TrainingState
from tests.training.entrypoints import batch, model


@functools.cache
def expected_weights(sync_interval: int, steps: int = 60, shard_count: int = 2) -> str:
    """Return the digest of weights and optimizer state after ``steps`` steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the shards: sums of several threads differ in the last bit
    try:
        shards = [_new_shard() for _ in range(shard_count)]
        for step in range(steps):
            for number, (net, optimizer) in enumerate(shards):
                seed_everything(0, step, number)
                x, y = batch(step, number)
                loss = nn.functional.mse_loss(net(x), y)
                optimizer.zero_grad()
                loss.backward()
            if sync_interval == 1:
                _average([[p.grad for p in net.parameters()] for net, _ in shards])
                _average([[b for b in net.buffers() if b.is_floating_point()] for net, _ in shards])
            for _, optimizer in shards:
                optimizer.step()
            if sync_interval > 1 and ((step + 1) % sync_interval == 0 or step + 1 == steps):
                _average([list(net.parameters()) for net, _ in shards])
                _average([[b for b in net.buffers() if b.is_floating_point()] for net, _ in shards])
                for key in ("exp_avg", "exp_avg_sq"):
                    _average([[state[key] for state in optimizer.state.values()] for _, optimizer in shards])
        digests = {TrainingState([net], [optimizer]).digest() for net, optimizer in shards}
    finally:
        torch.set_num_threads(threads)
    (digest,) = digests  # all shards hold the same
    return digest


def _new_shard() -> tuple[nn.Module, torch.optim.Optimizer]:
    seed_everything(0, 0, 0)
    net = model()
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


@torch.no_grad()
def _average(tensors_of_shards: list[list[torch.Tensor]]) -> None:
    for same in zip(*tensors_of_shards, strict=True):
        mean = sum(same[1:], start=same[0].clone()) / len(same)
        for tensor in same:
            tensor.copy_(mean)
