from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.server.app import create_app, standalone
from airflow_gpu_provider.server.auth import mint_token
from airflow_gpu_provider.server.broker import Broker

from .conftest import SECRET, serving


@pytest.fixture
def alone(settings: Settings) -> Iterator[httpx.Client]:
    """Serve a broker as `airflow gpu broker` does."""
    app = standalone(create_app(lambda: Broker(settings), people=False))
    token = mint_token(SECRET, role="task", subject="test", ttl_s=60)
    headers = {"Authorization": f"Bearer {token}"}
    with serving(app) as url, httpx.Client(base_url=url, headers=headers, trust_env=False) as client:
        yield client


def test_a_server_of_its_own_answers_under_the_same_path_as_the_api_server(alone: httpx.Client) -> None:
    assert alone.get("/gpu/v1/status").status_code == 200
    answer = alone.post("/gpu/v1/claims/none/collect", json={})
    assert (answer.status_code, answer.json()["detail"]["reason"]) == (400, "unknown_claim")
    assert alone.get("/v1/status").status_code == 404


def test_what_is_no_call_is_answered_by_the_app(alone: httpx.Client) -> None:
    assert alone.get("/gpu/v1/claims").status_code == 405
    assert alone.post("/gpu/v1/claims//collect", json={}).status_code == 404
    assert alone.post("/gpu/v1/claims/a/b/collect", json={}).status_code == 404
    assert alone.get("/gpu/v1/nothing").status_code == 404


def test_a_wrong_number_of_seconds_is_refused_and_the_last_one_counts(alone: httpx.Client) -> None:
    asked = {"key": {"dag_id": "d", "run_id": "r", "task_id": "t"}, "request": {}}
    for wrong in ("wait_s=31", "wait_s=x", "wait_s=nan", "wait_s=1&wait_s=-1"):
        answer = alone.post(f"/gpu/v1/claims?{wrong}", json=asked)
        assert (answer.status_code, answer.json()["detail"]["reason"]) == (422, "invalid_body"), wrong
