"""Finds the route of a call by two look-ups, before any layer of the web framework.

What is no call of a program goes on to the app inside, and so does whatever a program may not: the app
answers 404 and 405. While the broker does not run, everything is answered 503.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from airflow_gpu_provider.server.program_route import Endpoint


class Programs:
    """The outermost layer of the broker's app."""

    def __init__(self, app: ASGIApp, owner: Starlette, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._owner = owner
        self._fixed: dict[tuple[str, str], ASGIApp] = {}
        #: method, what comes before and after the one variable part -> its name, the endpoint
        self._named: dict[tuple[str, str, str], tuple[str, ASGIApp]] = {}
        for route in routes:
            if isinstance(route, Route) and isinstance(route.endpoint, Endpoint):
                for method in (route.methods or set()) - {"HEAD"}:
                    self._add(method, route.path, route.endpoint)

    def _add(self, method: str, path: str, endpoint: ASGIApp) -> None:
        before, _, rest = path.partition("{")
        name, _, after = rest.partition("}")
        if not name:
            self._fixed[method, path] = endpoint
        elif after.startswith("/") and "/" not in after[1:]:
            self._named[method, before, after] = name, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if getattr(self._owner.state, "broker", None) is None:
            await _down(scope, receive, send)
            return
        method, path = scope["method"], scope["path"].removeprefix(scope.get("root_path", ""))
        endpoint, parts = self._fixed.get((method, path)), {}
        if endpoint is None:  # as /v1/claims/{claim_id}/collect
            stem, _, last = path.rpartition("/")
            before, _, value = stem.rpartition("/")
            name, endpoint = self._named.get((method, f"{before}/", f"/{last}"), ("", self._app))
            endpoint, parts = (endpoint if value else self._app), {name: value}
        if endpoint is not self._app:
            scope["app"], scope["path_params"] = self._owner, parts
        await endpoint(scope, receive, send)


async def _down(scope: Scope, receive: Receive, send: Send) -> None:
    # Whoever asks is not identified yet: the reason stays in the log.
    message = "The GPU broker is not running; the log of the API server says why."
    detail = {"detail": {"reason": "broker_unavailable", "message": message}}
    await JSONResponse(detail, 503)(scope, receive, send)
