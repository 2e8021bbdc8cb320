"""PyTorch is kept to the leased part of a device; a driver is not there, so its answers are given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from airflow_gpu_provider.training.memory_limit import limit_torch_memory, memory_fraction


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Return what is set on each of two devices of 80 GB."""
    found: dict[int, float] = {}
    total = SimpleNamespace(total_memory=84_974_239_744)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: total)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, number: found.update({number: fraction}),
    )
    return found


def test_without_a_limit_nothing_is_set(limited: dict[int, float]) -> None:
    assert limit_torch_memory({}) is None
    assert limited == {}


def test_the_allocator_gets_what_the_context_leaves(limited: dict[int, float]) -> None:
    part = limit_torch_memory({"GPU_MEMORY_LIMIT_MIB": "8192"})
    assert limited == {0: part, 1: part}
    assert part is not None
    assert part * 84_974_239_744 == pytest.approx((8192 - 512) * 2**20)


def test_a_machine_without_devices_has_nothing_to_limit() -> None:
    assert limit_torch_memory({"GPU_MEMORY_LIMIT_MIB": "8192"}) is None


@pytest.mark.parametrize(("limit_mib", "total_mib"), [(100, 80_000), (90_000, 80_000)])
def test_a_fraction_is_always_one(limit_mib: int, total_mib: float) -> None:
    assert 0 < memory_fraction(limit_mib, total_mib) <= 1
