"""Walks bound pods through their phases, as the kubelets of all nodes together.

What becomes of a pod is its `Fate`: by default it runs until it is deleted. A fate may fail in each of the
ways that a real kubelet reports, or run the container's command as a process of this machine. The kubelet of
a lost node does nothing any more: its pods stay as they are.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

from tests.kubernetes.deletion import Deletion
from tests.kubernetes.local_process import LocalProcess
from tests.kubernetes.object_store import Change, Object, ObjectStore, name_of, timestamp
from tests.kubernetes.resources import BUILTIN
from tests.kubernetes.scheduler import with_condition

_PODS = BUILTIN[0]
_OVER = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a pod once it is bound to a node."""

    refused: str | None = None  #: the node does not take it: "UnexpectedAdmissionError"
    stuck: str | None = None  #: its containers never start: "ImagePullBackOff"
    runs_s: float | None = None  #: then it ends; None = runs until it is deleted
    exit_code: int = 0
    reason: str | None = None  #: of a container that ended: "OOMKilled"
    evicted: str | None = None  #: the node puts it out after ``runs_s``, with these words
    runs_command: bool = False  #: for real, as a process of this machine


class Kubelet:
    """The kubelets of all nodes. ``fates`` are by the beginning of a pod's name, the longest wins."""

    def __init__(
        self, store: ObjectStore, deletion: Deletion, logs: dict[tuple[str, str], bytearray]
    ) -> None:
        self._store = store
        self._deletion = deletion
        self._logs = logs
        self._addresses = itertools.count(2)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()
        self.fates: dict[str, Fate] = {}
        self.lost: set[str] = set()
        store.listeners.append(self._on_change)

    async def close(self) -> None:
        """End all pods' tasks, and the processes below them."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _on_change(self, change: Change) -> None:
        pod = change.after
        if change.resource is not _PODS:
            return
        if pod is None:
            if change.before is not None and (task := self._tasks.get(change.before["metadata"]["uid"])):
                task.cancel()
            return
        uid, node = pod["metadata"]["uid"], pod["spec"].get("nodeName")
        if node and node not in self.lost and uid not in self._tasks:
            task = self._loop.create_task(self._live(pod))
            self._tasks[uid] = task
            task.add_done_callback(lambda _: self._tasks.pop(uid, None))

    async def _live(self, pod: Object) -> None:
        """Lead one pod from its node's acceptance to its end and its removal."""
        fate = self._fate(pod["metadata"]["name"])
        if fate.refused:
            self._write(
                pod, phase="Failed", reason=fate.refused, message="Pod was rejected: no healthy device"
            )
        elif fate.stuck:
            self._write(
                pod, containers={"waiting": {"reason": fate.stuck, "message": "a fate of the imitation"}}
            )
        else:
            await self._run(pod, fate)
        while not self._ended_or_condemned(pod):
            await self._store.wait(1.0)
        await self._until_deleted(pod)

    async def _run(self, pod: Object, fate: Fate) -> None:
        address = f"127.1.{(number := next(self._addresses)) // 250}.{number % 250 + 1}"
        for container in pod["spec"]["containers"]:
            self._logs.setdefault((pod["metadata"]["uid"], container["name"]), bytearray())
        self._write(pod, phase="Running", podIP=address, podIPs=[{"ip": address}], hostIP="127.0.0.1",
                    startTime=timestamp(), containers={"running": {"startedAt": timestamp()}})  # fmt: skip
        code, reason = fate.exit_code, fate.reason
        if fate.runs_command:
            code = await self._run_command(pod)
        elif not await self._lasts(pod, fate.runs_s):
            code, reason = 137, "Error"
        if fate.evicted:
            self._write(pod, phase="Failed", reason="Evicted", message=fate.evicted,
                        disruption="TerminationByKubelet", containers=_terminated(137, "Error"))  # fmt: skip
            return
        phase = "Failed" if code else "Succeeded"
        self._write(
            pod, phase=phase, containers=_terminated(code, reason or ("Error" if code else "Completed"))
        )

    async def _lasts(self, pod: Object, seconds: float | None) -> bool:
        """Return whether a pod ran its time, not when it was deleted before."""
        ends = None if seconds is None else self._loop.time() + seconds
        while not self._is_condemned(pod):
            left = 1.0 if ends is None else ends - self._loop.time()
            if left <= 0:
                return True
            await self._store.wait(min(left, 1.0))
        return False

    async def _run_command(self, pod: Object) -> int:
        container = pod["spec"]["containers"][0]
        log = self._logs[pod["metadata"]["uid"], container["name"]]
        async with LocalProcess(self._current(pod) or pod, container, log) as process:
            while not process.has_ended() and not self._is_condemned(pod):
                await self._store.wait(0.02)
            grace = (self._current(pod) or pod)["metadata"].get("deletionGracePeriodSeconds", 0)
            return await process.end(grace)

    async def _until_deleted(self, pod: Object) -> None:
        while (current := self._current(pod)) is not None:
            if "deletionTimestamp" in current["metadata"] and pod["spec"]["nodeName"] not in self.lost:
                self._deletion.delete(_PODS, name_of(current), {"gracePeriodSeconds": 0})
                if (left := self._current(pod)) is None or left["metadata"].get("finalizers"):
                    return
            await self._store.wait(1.0)

    def _fate(self, name: str) -> Fate:
        fitting = [prefix for prefix in self.fates if name.startswith(prefix)]
        return self.fates[max(fitting, key=len)] if fitting else Fate()

    def _current(self, pod: Object) -> Object | None:
        found = self._store.find(_PODS, name_of(pod))
        return found if found is not None and found["metadata"]["uid"] == pod["metadata"]["uid"] else None

    def _is_condemned(self, pod: Object) -> bool:
        current = self._current(pod)
        is_lost = pod["spec"]["nodeName"] in self.lost
        return current is None or (not is_lost and "deletionTimestamp" in current["metadata"])

    def _ended_or_condemned(self, pod: Object) -> bool:
        current = self._current(pod)
        return current is None or current["status"]["phase"] in _OVER or self._is_condemned(pod)

    def _write(
        self, pod: Object, *, containers: Object | None = None, disruption: str | None = None, **status: Any
    ) -> None:
        current = self._current(pod)
        if current is None or pod["spec"]["nodeName"] in self.lost:
            return
        new = {**current, "status": {**current["status"], **status}}
        if containers is not None:
            new["status"]["containerStatuses"] = [
                _container_status(each, containers) for each in pod["spec"]["containers"]
            ]
        is_ready = status.get("phase") == "Running"
        new = with_condition(new, "Ready", "True" if is_ready else "False")
        if disruption:
            new = with_condition(new, "DisruptionTarget", "True", reason=disruption)
        self._store.replace(_PODS, new)


def _terminated(code: int, reason: str) -> Object:
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": timestamp()}}


def _container_status(container: Object, state: Object) -> Object:
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "restartCount": 0,
        "ready": "running" in state,
        "started": "running" in state,
        "state": state,
    }
