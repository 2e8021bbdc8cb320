"""A container's command as a process of this machine, for pods whose fate says so.

The command is started as it stands, with the environment that the pod gives it (field references too) and the
variables a process needs. Images, volumes and limits mean nothing here. Nothing is left behind: the process
leads a group of its own, which is killed at the end.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

from tests.kubernetes.object_store import Object

_KEPT = ("PATH", "PYTHONPATH", "HOME", "LANG")


class LocalProcess:
    """Runs a command as an async context."""

    def __init__(self, pod: Object, container: Object, log: bytearray) -> None:
        self._pod = pod
        self._container = container
        self._log = log

    async def __aenter__(self) -> LocalProcess:
        command = [*self._container.get("command", []), *self._container.get("args", [])]
        self._process = await asyncio.create_subprocess_exec(
            *command,
            env=self._environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):  # all of the group may have ended by themselves
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._reading

    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def end(self, grace_s: float) -> int:
        """Return how it ended, after SIGTERM and ``grace_s`` if it still runs; signals count from 128."""
        if not self.has_ended():
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), grace_s)
            except asyncio.TimeoutError:
                self._process.kill()
        code = await self._process.wait()
        await self._reading
        return code if code >= 0 else 128 - code

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while piece := await self._process.stdout.read(65_536):
            self._log += piece

    def _environment(self) -> dict[str, str]:
        told = {name: os.environ[name] for name in _KEPT if name in os.environ}
        for each in self._container.get("env", []):
            reference = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            told[each["name"]] = self._field(reference) if reference else each.get("value", "")
        return told

    def _field(self, path: str) -> str:
        found: object = self._pod
        for part in path.split("."):
            found = found.get(part, "") if isinstance(found, dict) else ""
        return str(found)
