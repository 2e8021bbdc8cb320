"""An imitated cluster for a test: API server, scheduler, kubelets and node controller in one thread.

`running` starts it and yields it with its URL; what a test wants of it from outside the event loop goes
through `Imitation.call`. Nothing here was compared with a real cluster beyond what the official clients and
kubectl accept.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.kubelet import Fate, Kubelet
from tests.kubernetes.object_store import Object, timestamp
from tests.kubernetes.resources import ResourceType, ResourceTypes
from tests.kubernetes.scheduler import Scheduler, with_condition

_T = TypeVar("_T")
_UNREACHABLE = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute", "timeAdded": timestamp()}


class Imitation:
    """A running cluster."""

    def __init__(self, *, schemas: str | None, types: tuple[ResourceType, ...]) -> None:
        self._loop = asyncio.new_event_loop()
        self._schemas = schemas
        self._types = types
        self._thread = threading.Thread(target=self._loop.run_forever, name="imitated-cluster", daemon=True)
        self.url = ""

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    async def _start(self) -> None:
        self.api = ApiServer(types=ResourceTypes(self._types), schemas=self._schemas)
        self.scheduler = Scheduler(self.api.store)
        self.kubelet = Kubelet(self.api.store, self.api.deletion, self.api.pod_calls.logs)
        self._scheduling = asyncio.create_task(self.scheduler.run())
        self._runner = web.AppRunner(self.api.app, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        await self._listen(0)

    async def _listen(self, port: int) -> None:
        self._site = web.TCPSite(self._runner, "127.0.0.1", port)
        await self._site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _stop(self) -> None:
        self._scheduling.cancel()
        await asyncio.gather(self._scheduling, return_exceptions=True)
        await self.kubelet.close()
        await self._runner.cleanup()

    def call(self, function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Call a function in the cluster's event loop."""

        async def called() -> _T:
            return function(*args, **kwargs)

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(30)

    def create(self, *bodies: Object, namespace: str = "default") -> list[Object]:
        """Create objects of any kind, as clients would."""
        return self.call(lambda: [self._create(body, namespace) for body in bodies])

    def _create(self, body: Object, namespace: str) -> Object:
        resource = self.api.types.of_kind(body["apiVersion"], body["kind"])
        assert resource is not None, body["kind"]
        where = body["metadata"].get("namespace", namespace) if resource.is_namespaced else ""
        return self.api.create(resource, where, body)

    def change(
        self, plural: str, name: str, change: Callable[[Object], Object], namespace: str = "default"
    ) -> Object:
        """Replace an object by what ``change`` makes of it."""
        return self.call(self._change, plural, name, change, namespace)

    def _change(self, plural: str, name: str, change: Callable[[Object], Object], namespace: str) -> Object:
        resource = self.resource(plural)
        key = (namespace if resource.is_namespaced else "", name)
        return self.api.store.replace(
            resource, change(json.loads(json.dumps(self.api.store.get(resource, key))))
        )

    def delete(self, plural: str, name: str, namespace: str = "default", **options: Any) -> None:
        resource = self.resource(plural)
        key = (namespace if resource.is_namespaced else "", name)
        self.call(self.api.deletion.delete, resource, key, options)

    def all(self, plural: str) -> list[Object]:
        return self.call(self.api.store.all, self.resource(plural))

    def pod(self, name: str, namespace: str = "default") -> Object | None:
        return self.call(self.api.store.find, self.resource("pods"), (namespace, name))

    def resource(self, plural: str) -> ResourceType:
        return next(each for each in self.api.types.all if each.plural == plural)

    def lose_node(self, name: str, *, evict: bool = True) -> None:
        """Let a node fall silent; with ``evict`` its pods are to be deleted, which nobody there does."""
        self.call(self._lose_node, name, evict)

    def _lose_node(self, name: str, evict: bool) -> None:
        self.kubelet.lost.add(name)
        self._change("nodes", name, _unreachable, "")
        for pod in self.api.store.all(self.resource("pods")):
            if evict and pod["spec"].get("nodeName") == name:
                self._evict(pod)

    def _evict(self, pod: Object) -> None:
        pods, metadata = self.resource("pods"), pod["metadata"]
        told = {
            "reason": "DeletionByTaintManager",
            "message": "Taint manager: deleting due to NoExecute taint",
        }
        self.api.store.replace(pods, with_condition(pod, "DisruptionTarget", "True", **told))
        self.api.deletion.delete(pods, (metadata["namespace"], metadata["name"]), {})

    def requests(self, part: str = "") -> list[str]:
        """Return the requests so far whose line holds ``part``."""
        return [line for line in self.api.requests if part in line]

    def wait_for(self, holds: Callable[[], object], what: str, *, seconds: float = 20.0) -> None:
        """Return as soon as something holds; fail with ``what`` when it never does."""
        until = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < until, f"not within {seconds} s: {what}"
            time.sleep(0.01)

    def stop_listening(self) -> None:
        """Let the API server be away: connections are refused and open ones end."""
        asyncio.run_coroutine_threadsafe(self._stop_listening(), self._loop).result(10)

    async def _stop_listening(self) -> None:
        await self._site.stop()
        for connection in list(self._runner.server.connections if self._runner.server else ()):
            if connection.transport is not None:
                connection.transport.abort()

    def listen_again(self) -> None:
        """Let the API server be back at the same address."""
        asyncio.run_coroutine_threadsafe(self._listen(self.port), self._loop).result(10)

    def write_kubeconfig(self, file: Path, *, namespace: str = "default") -> Path:
        """Write what clients and kubectl need to reach it."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "imitation",
            "clusters": [{"name": "imitation", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": "test"}}],
            "contexts": [
                {
                    "name": "imitation",
                    "context": {"cluster": "imitation", "user": "test", "namespace": namespace},
                }
            ],
        }
        file.write_text(json.dumps(content))
        return file


def _unreachable(node: Object) -> Object:
    told = {"reason": "NodeStatusUnknown", "message": "Kubelet stopped posting node status."}
    tainted = {**node, "spec": {**node.get("spec", {})}}
    tainted["spec"]["taints"] = [*tainted["spec"].get("taints", []), _UNREACHABLE]
    return with_condition(tainted, "Ready", "Unknown", **told)


@contextmanager
def running(*, schemas: str | None = None, types: tuple[ResourceType, ...] = ()) -> Iterator[Imitation]:
    """Run a cluster of one's own."""
    cluster = Imitation(schemas=schemas, types=types)
    cluster.start()
    try:
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}})
        yield cluster
    finally:
        cluster.stop()


__all__ = ["Fate", "Imitation", "running"]
