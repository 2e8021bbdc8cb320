"""What a shard process may see of the machine: its own devices, by UUID.

UUIDs, because indexes differ between NVML and CUDA; the bus order is set as well for code that counts
devices. A simulated device hides every real one, so that its work runs on the CPU. Used by `slots`.
"""

from __future__ import annotations

from collections.abc import Sequence


def device_environment(device_ids: Sequence[str], *, simulated: bool) -> dict[str, str]:
    """Return the variables that show exactly these devices to CUDA."""
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "" if simulated else ",".join(device_ids),
        # NCCL's default tears the process down when a peer is lost; survivors have to live on.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }
