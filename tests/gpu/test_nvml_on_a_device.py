"""The fields of a real device, and that CUDA and NVML mean the same one by its UUID."""

from __future__ import annotations

import pytest
import torch

from airflow_gpu_provider.inventory.nvml import NvmlProbe

pytestmark = pytest.mark.gpu


def test_a_real_device_tells_its_fields(device_id: str) -> None:
    probe = NvmlProbe("here")
    try:
        (node,) = probe.read()
        assert probe.off is None
    finally:
        probe.close()
    device = next(device for device in node.devices if device.id == device_id)
    total_mib = torch.cuda.get_device_properties(0).total_memory // 2**20
    assert device.model and not device.suspect
    assert 0.9 * total_mib <= device.memory_mib <= 1.1 * total_mib
    assert device.utilisation is None or 0 <= device.utilisation <= 100
