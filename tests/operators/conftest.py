"""The served broker of the server's tests, and the environment of a worker that asks it for devices."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.server.auth import mint_token
from tests.server.conftest import SECRET, base_url, broker, client, settings

__all__ = ["base_url", "broker", "client", "settings"]


@pytest.fixture
def environment(base_url: str) -> dict[str, str]:
    """Return what a worker needs: the connection, and the name of the host that the fleet is on."""
    token = mint_token(SECRET, role="task", subject="test", ttl_s=600)
    connection = {"conn_type": "gpu", "host": base_url, "password": token}
    return {"AIRFLOW_CONN_GPU_DEFAULT": json.dumps(connection), "GPU_HOST": "h1"}


@pytest.fixture
def hook(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuBrokerHook]:
    """Yield the hook of a task whose connection leads to the served broker."""
    name = "AIRFLOW_CONN_GPU_DEFAULT"
    monkeypatch.setenv(name, environment[name])
    hook = GpuBrokerHook()
    yield hook
    hook.close()
