"""A broker on a database of its own, served over real HTTP, with a fleet reported to it."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.reports import DeviceReport, NodeReport, ReportBody
from airflow_gpu_provider.server.app import create_app
from airflow_gpu_provider.server.auth import mint_token
from airflow_gpu_provider.server.board import Entry
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.wire import API_PREFIX, ClaimBody, RequestBody, TaskKey

SECRET = "a key for tests that is long enough to sign with"


def report(
    node: str = "n1",
    *,
    model: str = "A100",
    gpus: int = 2,
    host: str = "h1",
    suspect: str | None = None,
    memory_mib: int = 40_960,
    simulated: bool = False,
) -> NodeReport:
    """Return a node of equal devices named `GPU-<node>-<index>`."""
    tflops = {"A100": 35.0, "V100": 15.0}[model]
    devices = tuple(
        DeviceReport(
            id=f"GPU-{node}-{i}",
            model=model,
            memory_mib=memory_mib,
            tflops=tflops,
            suspect=suspect,
            simulated=simulated,
        )
        for i in range(gpus)
    )
    return NodeReport(name=node, host=host, cpu_cores=16, memory_mib=131_072, devices=devices)


@pytest.fixture
def settings(tmp_path: Path, migrated_database: Path) -> Settings:
    url = f"sqlite:///{shutil.copy(migrated_database, tmp_path / 'gpu.db')}"
    return Settings(token_secret=SECRET, sql_alchemy_conn=url, stale_after_s=600)


@pytest.fixture
def broker(settings: Settings) -> Iterator[Broker]:
    """Yield a broker whose leader decides, with two A100 on node n1 of host h1."""
    broker = Broker(settings)
    broker.start()
    broker.report(ReportBody(nodes=(report(),)))
    until_leading(broker)
    yield broker
    broker.stop()


def until_leading(broker: Broker) -> None:
    """Wait until the broker's leader serves."""
    deadline = time.monotonic() + 20
    while not broker.desk.is_open:
        assert time.monotonic() < deadline, "nobody leads"
        time.sleep(0.01)


def ask(
    broker: Broker,
    task: str,
    gpus: int = 1,
    *,
    try_number: int = 1,
    max_runtime_s: float | None = None,
    **more: object,
) -> str:
    """Submit a claim without HTTP; return its id."""
    key = TaskKey(dag_id="d", run_id="r", task_id=task, map_index=-1, try_number=try_number)
    request = RequestBody(gpus=gpus, max_runtime_s=max_runtime_s, task_class=f"{key.dag_id}.any")
    body = ClaimBody(key=key, request=request, **more)
    return asyncio.run(broker.submit(body, is_attended=False)).claim_id


def look(broker: Broker, claim_id: str, state: str, seconds: float = 20) -> Entry:
    """Return a claim, at once when it has that state, else as it is after some seconds."""
    deadline = time.monotonic() + seconds
    while True:
        entry = asyncio.run(broker.find(claim_id))
        if entry.state.value == state or time.monotonic() >= deadline:
            return entry
        time.sleep(0.02)


@pytest.fixture
def base_url(broker: Broker) -> Iterator[str]:
    """Serve the broker; yield the URL that a connection would name."""
    with served(broker) as url:
        yield url


@contextmanager
def served(broker: Broker) -> Iterator[str]:
    """Serve a broker that runs already; yield the URL that a connection would name."""

    class Running(Broker):
        def __init__(self) -> None:
            self.__dict__ = broker.__dict__

        def start(self) -> None:
            """Do nothing: it runs already."""

        def stop(self) -> None:
            """Do nothing: who made it stops it."""

    app = create_app(Running, people=False)
    outer = FastAPI(lifespan=lambda _: app.router.lifespan_context(app))
    outer.mount(API_PREFIX, app)
    with serving(outer) as url:
        yield url


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve an app; yield its URL."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended while starting"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def client(base_url: str) -> Iterator[Callable[[str | None], httpx.Client]]:
    """Return ``client(role)``: an HTTP client with a token of that role, None for no token."""
    opened: list[httpx.Client] = []

    def make(role: str | None, *, node: str | None = None) -> httpx.Client:
        headers = {}
        if role is not None:
            token = mint_token(SECRET, role=role, subject="test", ttl_s=600, node=node)
            headers["Authorization"] = f"Bearer {token}"
        opened.append(httpx.Client(base_url=base_url + API_PREFIX, headers=headers, trust_env=False))
        return opened[-1]

    yield make
    for each in opened:
        each.close()
