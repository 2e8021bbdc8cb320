"""Uses a device of 32 GiB that is not there, and says which limits PyTorch was given when."""

import multiprocessing
import types

import torch

GIVEN: list[tuple[float, int]] = []


def use() -> list[tuple[float, int]]:
    """Do what torch does at the first use of a device: what was queued for it."""
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda number: types.SimpleNamespace(total_memory=32 * 2**30)
    torch.cuda.set_per_process_memory_fraction = lambda part, number: GIVEN.append((part, number))
    for call, _ in torch.cuda._queued_calls:
        if call.__module__.startswith("airflow_gpu_provider"):
            call()
    return GIVEN


if __name__ == "__main__":
    print("imported:", GIVEN)
    print("used:", use())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("in a child:", pool.apply(use))
