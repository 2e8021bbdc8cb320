"""Waiting for artifacts in the triggerer, without holding a worker slot.

The checks read the disk, so they run in a thread: the triggerer's event loop serves thousands of triggers.
All state travels in the arguments or is rebuilt by looking again; a restart of the triggerer only costs one
more look.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_gpu_provider.sensors.artifact_state import ArtifactWatch


class ArtifactTrigger(BaseTrigger):
    """Fires once when every path holds a complete artifact."""

    def __init__(self, paths: Sequence[str], poke_interval: float) -> None:
        super().__init__()
        self.paths = list(paths)
        self.poke_interval = poke_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return how to build this trigger elsewhere."""
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {"paths": self.paths, "poke_interval": self.poke_interval},
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look at intervals; say why it waits whenever that changes."""
        watch = ArtifactWatch(self.paths)
        told: list[str] = []
        while True:
            missing = await asyncio.to_thread(watch.look)
            if not missing:
                yield TriggerEvent({"paths": self.paths})
                return
            if missing != told:
                self.log.info("Waiting for artifacts: %s", "; ".join(missing))
                told = missing
            await asyncio.sleep(self.poke_interval)
