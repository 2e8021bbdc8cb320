"""The calls that only pods have: bind to a node, evict, read the log."""

from __future__ import annotations

import asyncio

from aiohttp import web

from tests.kubernetes.deletion import Deletion
from tests.kubernetes.errors import ApiError, bad_request, conflict
from tests.kubernetes.object_store import Object, ObjectStore
from tests.kubernetes.paths import Target

_SUCCESS = {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}
_LOOK_AGAIN_S = 0.02


class PodCalls:
    """Answers them. ``logs`` is filled by whatever runs the containers."""

    def __init__(self, store: ObjectStore, deletion: Deletion) -> None:
        self._store = store
        self._deletion = deletion
        self.logs: dict[tuple[str, str], bytearray] = {}  #: by uid of the pod and container

    async def serve(self, request: web.Request, target: Target) -> web.StreamResponse:
        pod = self._store.get(target.resource, target.key)
        if target.subresource == "log" and request.method == "GET":
            return await self._log(request, target, pod)
        if request.method != "POST":
            raise ApiError(405, "MethodNotAllowed", f"{request.method} is not allowed here")
        body = await request.json()
        if target.subresource == "binding":
            self._bind(target, pod, body["target"]["name"])
        else:
            self._deletion.delete(target.resource, target.key, body.get("deleteOptions") or {})
        return web.json_response(_SUCCESS, status=201)

    def _bind(self, target: Target, pod: Object, node: str) -> None:
        if pod["spec"].get("nodeName"):
            raise conflict(
                "pods/binding", target.name, f"pod is already assigned to {pod['spec']['nodeName']}"
            )
        self._store.replace(target.resource, {**pod, "spec": {**pod["spec"], "nodeName": node}})

    async def _log(self, request: web.Request, target: Target, pod: Object) -> web.StreamResponse:
        containers = [each["name"] for each in pod["spec"]["containers"]]
        container = request.query.get("container") or containers[0]
        if container not in containers:
            raise bad_request(f"container {container} is not valid for pod {target.name}")
        uid = pod["metadata"]["uid"]
        log = self.logs.get((uid, container))
        if log is None:
            raise bad_request(f'container "{container}" in pod "{target.name}" is waiting to start')
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        lines, tail = bytes(log).splitlines(keepends=True), request.query.get("tailLines")
        start = 0 if tail is None else len(b"".join(lines[: max(0, len(lines) - int(tail))]))
        follows = request.query.get("follow", "").lower() in ("1", "true")
        while True:
            await response.write(bytes(log[start:]))
            start = len(log)
            if not follows or not self._is_running(target, uid):
                return response
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _is_running(self, target: Target, uid: str) -> bool:
        pod = self._store.find(target.resource, target.key)
        return pod is not None and pod["metadata"]["uid"] == uid and pod["status"]["phase"] == "Running"
