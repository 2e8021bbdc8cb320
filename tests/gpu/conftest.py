"""Tests in this folder need one NVIDIA GPU; without one each is skipped and says why."""

from __future__ import annotations

import pytest
import torch


def why_no_device() -> str | None:
    """Return why CUDA cannot be used here, None where it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "CUDA finds no device here: no driver, or none is visible"
    return None


@pytest.fixture(autouse=True)
def _device() -> None:
    if (why := why_no_device()) is not None:
        pytest.skip(why)


@pytest.fixture
def device_id() -> str:
    """Return the UUID of the device that the tests use."""
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"
