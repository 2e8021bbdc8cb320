"""The broker's web application: mounted on Airflow's API server, or served alone by `airflow gpu broker`.

No route answers without an identity, and the app has no pages of documentation of its own. The broker is
built when the app starts, not when it is imported, since every Airflow process loads the plugin.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from airflow_gpu_provider.exceptions import GpuProviderError
from airflow_gpu_provider.server import agents_api, changes_api, claims_api, history_api, people_api
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.programs import Programs
from airflow_gpu_provider.store.wrong_database import explained
from airflow_gpu_provider.wire import API_PREFIX

log = logging.getLogger(__name__)

_START_S = 10.0  # the API server waits this long for the broker before it serves without it
_AGAIN_S = 5.0


def create_app(make_broker: Callable[[], Broker], *, people: bool) -> FastAPI:
    """Return the app. `people` adds the routes behind Airflow's login, which need Airflow's API server."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # The API server must come up without us, and a database that is away for a moment comes back.
        starting = asyncio.create_task(_start(app, make_broker), name="gpu-broker-start")
        await asyncio.wait({starting}, timeout=_START_S)
        try:
            yield
        finally:
            starting.cancel()
            if getattr(app.state, "broker", None) is not None:
                await run_in_threadpool(app.state.broker.stop)

    app = FastAPI(title="GPU broker", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    for api in (claims_api, changes_api, agents_api, people_api, history_api):
        app.router.routes.extend(api.ROUTES)
    if people:
        from airflow_gpu_provider.server import ui_api

        app.include_router(ui_api.router)
    app.add_middleware(Programs, owner=app, routes=app.routes)
    return app


def standalone(app: FastAPI) -> ASGIApp:
    """Return the app for a server of its own, under the same path as on Airflow's API server."""
    programs = Programs(app, owner=app, routes=app.routes)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
        elif scope["path"].startswith(f"{API_PREFIX}/"):
            scope["root_path"] = API_PREFIX
            await programs(scope, receive, send)
        else:
            await JSONResponse({"detail": f"The broker is at {API_PREFIX}."}, 404)(scope, receive, send)

    return serve


async def _start(app: FastAPI, make_broker: Callable[[], Broker]) -> None:
    """Start the broker, again and again until it runs."""
    while True:
        try:
            broker = await run_in_threadpool(make_broker)
            await run_in_threadpool(broker.start)
        except Exception as error:
            told = error if isinstance(error, GpuProviderError) else explained(error)
            if told is None:
                log.exception("The GPU broker could not start; trying again in %g s", _AGAIN_S)
            else:
                log.error("The GPU broker could not start; trying again in %g s: %s", _AGAIN_S, told)
            await asyncio.sleep(_AGAIN_S)
        else:
            app.state.broker = broker
            return


def airflow_app() -> FastAPI:
    """Return the app for Airflow's API server."""
    from airflow_gpu_provider.config import Settings
    from airflow_gpu_provider.server.airflow_tasks import AirflowTasks

    return create_app(lambda: Broker(Settings.load(), task_states=AirflowTasks()), people=True)
