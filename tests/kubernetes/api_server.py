"""An imitation of the Kubernetes API server over real HTTP, for official clients and kubectl.

It keeps objects, versions, watches, lists, patches and deletions as the API promises them. Beside it
`scheduler` and `kubelet` act on pods. No access rules and no webhooks: what it takes, a real cluster may
refuse. `imitation` runs all of it for a test.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from tests.kubernetes.admission import Admission
from tests.kubernetes.deletion import Deletion
from tests.kubernetes.errors import ApiError, bad_request, not_found
from tests.kubernetes.faults import Faults
from tests.kubernetes.listing import Lists
from tests.kubernetes.object_store import Object, ObjectStore
from tests.kubernetes.patches import patched
from tests.kubernetes.paths import Target, parsed
from tests.kubernetes.pod_calls import PodCalls
from tests.kubernetes.resources import ResourceType, ResourceTypes
from tests.kubernetes.selectors import matcher
from tests.kubernetes.watching import Watches

_KEPT = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")


class ApiServer:
    """Answers requests; everything runs in one event loop."""

    def __init__(
        self,
        *,
        types: ResourceTypes | None = None,
        schemas: str | None = None,
        bookmark_every_s: float = 0.2,
    ) -> None:
        self.types = types or ResourceTypes()
        self.minor = (schemas or "1.34").split(".")[1]
        self.store = ObjectStore()
        self.faults = Faults()
        self.requests: list[str] = []
        self.admission = Admission(schemas)
        self.deletion = Deletion(self.store, self.types)
        self.store.listeners.append(self.deletion.on_change)
        self.lists = Lists(self.store)
        self.watches = Watches(self.store, self.faults, bookmark_every_s=bookmark_every_s)
        self.pod_calls = PodCalls(self.store, self.deletion)
        self.app = web.Application(middlewares=[self._answer_errors], client_max_size=3 * 2**20)
        self.app.router.add_route("*", "/{path:.*}", self._serve)

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        line = f"{request.method} {request.path_qs}"
        self.requests.append(line)
        try:
            await asyncio.sleep(self.faults.answer_delay_s)
            self.faults.check(line)
            answer: web.StreamResponse = await handler(request)
            return answer
        except ApiError as error:
            headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
            return web.json_response(error.status(), status=error.code, headers=headers)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        document = self._document(request.path.strip("/").split("/"))
        if document is not None:
            return web.json_response(document)
        target = parsed(request.path, self.types)
        if target.subresource in ("log", "binding", "eviction"):
            return await self.pod_calls.serve(request, target)
        if not target.name:
            return await self._serve_collection(request, target)
        match request.method:
            case "GET":
                return web.json_response(self.store.get(target.resource, target.key))
            case "DELETE":
                options = await _options(request)
                return web.json_response(self.deletion.delete(target.resource, target.key, options))
            case "PUT":
                return web.json_response(self._replaced(target, await _body(request)))
            case "PATCH":
                before = self.store.get(target.resource, target.key)
                new = patched(
                    before, await _body(request), request.content_type, is_builtin=target.resource.is_builtin
                )
                return web.json_response(self._replaced(target, new))
        raise ApiError(405, "MethodNotAllowed", f"{request.method} is not allowed here")

    async def _serve_collection(self, request: web.Request, target: Target) -> web.StreamResponse:
        resource, query = target.resource, request.query
        if request.method == "POST":
            new = self.create(resource, target.namespace, await _body(request))
            return web.json_response(new, status=201)
        selected = matcher(resource.kind, query.get("labelSelector", ""), query.get("fieldSelector", ""))

        def matches(each: Object) -> bool:
            in_namespace = not target.namespace or each["metadata"].get("namespace") == target.namespace
            return in_namespace and selected(each)

        if request.method == "DELETE":
            options = await _options(request)
            for each in [each for each in self.store.all(resource) if matches(each)]:
                name = (each["metadata"].get("namespace", ""), each["metadata"]["name"])
                self.deletion.delete(resource, name, options)
            return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})
        if query.get("watch", "").lower() in ("1", "true"):
            return await self.watches.serve(request, resource, matches)
        return web.json_response(self.lists.page(resource, matches, query))

    def create(self, resource: ResourceType, namespace: str, body: Object) -> Object:
        """Store a new object, as a POST does."""
        if resource.is_namespaced and not namespace:
            raise bad_request("an empty namespace may not be set during creation")
        return self.store.add(resource, self.admission.admitted(resource, namespace, body))

    def _replaced(self, target: Target, new: Object) -> Object:
        """Store what a PUT or PATCH asks for: the status or all but the status, never both."""
        resource, before = target.resource, self.store.get(target.resource, target.key)
        metadata = new.get("metadata", {})
        expected = metadata.get("resourceVersion")
        fixed = {name: before["metadata"][name] for name in _KEPT if name in before["metadata"]}
        fixed |= {"name": target.name, "resourceVersion": before["metadata"]["resourceVersion"]}
        if resource.is_namespaced:
            fixed["namespace"] = target.namespace
        if target.subresource == "status":
            new = {**before, "status": new.get("status", {})}
        else:
            new = {**new, "metadata": {**metadata, **fixed}}
            if resource.has_status:
                new["status"] = before.get("status", {})
            self.admission.check_schema(resource, new)
        return self.deletion.finish(resource, self.store.replace(resource, new, expected=expected))

    def _document(self, path: list[str]) -> dict[str, Any] | None:
        """Return what tells clients about the server, None when the path asks for something else."""
        match path:
            case ["version"]:
                return {"major": "1", "minor": self.minor, "gitVersion": f"v1.{self.minor}.0-imitation",
                        "gitCommit": "0", "gitTreeState": "clean", "buildDate": "2026-01-01T00:00:00Z",
                        "goVersion": "none", "compiler": "none", "platform": "linux/amd64"}  # fmt: skip
            case ["api"]:
                return self.types.core_versions()
            case ["apis"]:
                return self.types.groups()
            case ["api", version]:
                return self.types.resources("", version)
            case ["apis", group, version]:
                return self.types.resources(group, version)
            case ["openapi", *_]:
                raise not_found("no OpenAPI document: run kubectl with --validate=false")
        return None


async def _body(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except ValueError as error:
        raise bad_request(f"the body is no JSON: {error}") from error


async def _options(request: web.Request) -> Object:
    """Return the options of a deletion, of its body and its query."""
    options: Object = await _body(request) if request.can_read_body else {}
    if "gracePeriodSeconds" in request.query:
        options["gracePeriodSeconds"] = int(request.query["gracePeriodSeconds"])
    if "propagationPolicy" in request.query:
        options["propagationPolicy"] = request.query["propagationPolicy"]
    return options
