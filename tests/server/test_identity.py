"""No route answers without an identity, and none to the wrong one."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import jwt
import pytest
from starlette.routing import Route

from airflow_gpu_provider.exceptions import IdentityRefused, InvalidRequest
from airflow_gpu_provider.server.app import airflow_app
from airflow_gpu_provider.server.auth import (
    check_lease_secret,
    lease_secret,
    mint_token,
    verify_token,
)

from .conftest import SECRET, report

Client = Callable[..., httpx.Client]


def _routes() -> list[tuple[str, str]]:
    app = airflow_app()
    return [
        (method, route.path)
        for route in app.routes
        if isinstance(route, Route)  # APIRoute is one too
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]


def test_the_app_has_routes_for_programs_and_people_and_no_documentation_pages() -> None:
    paths = {path for _method, path in _routes()}
    assert {"/v1/claims", "/v1/agents/report", "/ui/nodes"} <= paths
    assert {route.path for route in airflow_app().routes} == paths, "docs or openapi routes are on"


@pytest.mark.parametrize("method, path", [r for r in _routes() if r[1].startswith("/v1")])
def test_no_route_for_programs_answers_without_a_token(method: str, path: str, client: Client) -> None:
    url = path.replace("{claim_id}", "x").replace("{lease_id}", "x")
    answer = client(None).request(method, url, json={})
    assert answer.status_code == 401, answer.text
    assert answer.json()["detail"]["reason"] == "no_token"


def test_documentation_pages_of_the_app_are_off(client: Client) -> None:
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert client("admin").get(path).status_code == 404


def test_an_agent_may_not_claim_and_a_task_may_not_report(client: Client) -> None:
    answer = client("agent").get("/v1/status")
    assert answer.status_code == 403
    assert "needs task or admin" in answer.json()["detail"]["message"]
    body = {"nodes": [report("n2").model_dump(mode="json")]}
    assert client("task").post("/v1/agents/report", json=body).status_code == 403
    assert client("admin").post("/v1/agents/report", json=body).status_code == 200


def test_a_token_bound_to_a_node_reports_that_node_only(client: Client) -> None:
    body = {"nodes": [report("n2").model_dump(mode="json")]}
    answer = client("agent", node="n1").post("/v1/agents/report", json=body)
    assert answer.status_code == 403
    assert answer.json()["detail"]["reason"] == "foreign_node"
    assert client("agent", node="n2").post("/v1/agents/report", json=body).status_code == 200


def test_a_token_of_another_key_or_past_its_time_is_refused_with_the_reason() -> None:
    good = mint_token(SECRET, role="task", subject="s", ttl_s=60)
    assert verify_token(SECRET, good).subject == "s"
    with pytest.raises(IdentityRefused, match="same \\[gpu\\] token_secret"):
        verify_token("some other key that is also long enough", good)
    claims = {"aud": "airflow-gpu-broker", "sub": "s", "role": "task", "exp": int(time.time()) - 1}
    with pytest.raises(IdentityRefused, match="has expired"):
        verify_token(SECRET, jwt.encode(claims, SECRET, algorithm="HS256"))


@pytest.mark.parametrize("missing", ["exp", "sub", "role", "aud"])
def test_a_token_without_one_of_its_claims_is_refused(missing: str) -> None:
    claims = {"aud": "airflow-gpu-broker", "sub": "s", "role": "task", "exp": int(time.time()) + 60}
    del claims[missing]
    with pytest.raises(IdentityRefused):
        verify_token(SECRET, jwt.encode(claims, SECRET, algorithm="HS256"))


def test_an_unsigned_token_is_refused() -> None:
    claims = {"aud": "airflow-gpu-broker", "sub": "s", "role": "admin", "exp": int(time.time()) + 60}
    with pytest.raises(IdentityRefused):
        verify_token(SECRET, jwt.encode(claims, None, algorithm="none"))


def test_minting_refuses_unknown_roles_by_naming_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="task, agent, admin"):
        mint_token(SECRET, role="root", subject="s", ttl_s=60)


def test_a_lease_secret_opens_its_own_epoch_only() -> None:
    secret = lease_secret(SECRET, "lease", 1)
    check_lease_secret(SECRET, "lease", 1, secret)
    for lease_id, epoch in (("lease", 2), ("other", 1)):
        with pytest.raises(IdentityRefused):
            check_lease_secret(SECRET, lease_id, epoch, secret)


def test_a_subject_that_is_too_long_to_store_gets_no_token_and_opens_nothing() -> None:
    with pytest.raises(InvalidRequest, match="at most 250 characters, asked 251"):
        mint_token(SECRET, role="admin", subject="s" * 251, ttl_s=60)
    claims = jwt.decode(
        mint_token(SECRET, role="admin", subject="s" * 250, ttl_s=60), options={"verify_signature": False}
    )
    foreign = jwt.encode({**claims, "sub": "s" * 251}, SECRET, algorithm="HS256")
    with pytest.raises(IdentityRefused, match="longer than 250"):
        verify_token(SECRET, foreign)


def test_an_id_that_no_database_can_store_is_refused_by_name(client: Client) -> None:
    task = client("task")
    answer = task.post("/v1/claims/a%00b/collect")
    assert (answer.status_code, answer.json()["detail"]["reason"]) == (422, "invalid_body")
    answer = task.post("/v1/claims/wait", json={"claim_ids": ["a\0b"], "timeout_s": 0})
    assert answer.status_code == 422
    assert "NUL" in answer.json()["detail"]["message"]
