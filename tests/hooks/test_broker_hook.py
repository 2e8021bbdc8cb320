"""The client against a served broker, and against servers that are not one."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator

import pytest

from airflow_gpu_provider.exceptions import BrokerUnavailable, IdentityRefused, InvalidRequest, LeaseLost
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.server.auth import mint_token
from airflow_gpu_provider.wire import (
    ClaimBody,
    ClaimState,
    ReleaseBody,
    RenewBody,
    RequestBody,
    TaskKey,
)
from tests.server.conftest import SECRET


def connect(monkeypatch: pytest.MonkeyPatch, host: str, *, token: str | None = None, **more: object) -> None:
    if token is None:
        token = mint_token(SECRET, role="task", subject="test", ttl_s=60)
    monkeypatch.setenv(
        "AIRFLOW_CONN_GPU_DEFAULT", json.dumps({"conn_type": "gpu", "host": host, "password": token, **more})
    )


@pytest.fixture
def hook(base_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuBrokerHook]:
    connect(monkeypatch, base_url)
    hook = GpuBrokerHook()
    yield hook
    hook.close()


def body(task: str, gpus: int = 1) -> ClaimBody:
    key = TaskKey(dag_id="d", run_id="r", task_id=task, map_index=-1, try_number=1)
    return ClaimBody(key=key, request=RequestBody(gpus=gpus))


def test_a_whole_life_of_a_lease(hook: GpuBrokerHook) -> None:
    view = hook.submit(body("one", gpus=2), wait_s=5)
    assert view.state is ClaimState.GRANTED and view.lease is not None
    lease = view.lease
    renewed = hook.renew(lease.lease_id, RenewBody(secret=lease.secret, epoch=1))
    assert renewed.expires_at >= lease.expires_at
    waiting = hook.submit(body("two"))
    assert hook.wait(waiting.claim_id, timeout_s=0.3) is None
    assert [row.claim_id for row in hook.queue()] == [waiting.claim_id]
    hook.release(lease.lease_id, ReleaseBody(secret=lease.secret, epoch=1))
    granted = hook.wait(waiting.claim_id, timeout_s=5)
    assert granted is not None and granted.state is ClaimState.GRANTED
    with pytest.raises(LeaseLost, match="released"):
        hook.renew(lease.lease_id, RenewBody(secret=lease.secret, epoch=1))
    hook.cancel(waiting.claim_id)
    assert (hook.leases(), hook.queue()) == ([], [])


def test_the_test_button_counts_nodes_and_devices(hook: GpuBrokerHook) -> None:
    ok, sentence = hook.test_connection()
    assert ok
    assert "1 nodes, 2 devices, 2 free" in sentence


def test_the_test_button_says_what_is_wrong(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, base_url, token="not a token")
    ok, sentence = GpuBrokerHook().test_connection()
    assert not ok
    assert "airflow gpu token" in sentence


def test_a_missing_connection_says_how_to_make_one() -> None:
    with pytest.raises(InvalidRequest, match=r"'gpu_nowhere' is not defined: add a connection of type `gpu`"):
        GpuBrokerHook("gpu_nowhere").status()


@pytest.mark.parametrize(
    "host, token, word", [("", "x", "no host"), ("http://localhost:1", "", "no password")]
)
def test_an_incomplete_connection_names_the_field(
    monkeypatch: pytest.MonkeyPatch, host: str, token: str, word: str
) -> None:
    connect(monkeypatch, host, token=token)
    with pytest.raises(InvalidRequest, match=word):
        GpuBrokerHook().status()


def test_a_broker_that_is_down_is_an_error_after_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=r"http://127.0.0.1:9/gpu.* did not answer for 0.5 s"):
        GpuBrokerHook(patience_s=0.5).status()
    assert time.monotonic() - started < 20, "an error, not a hang"


def test_a_token_of_the_wrong_role_is_refused_at_once(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, base_url, token=mint_token(SECRET, role="agent", subject="a", ttl_s=60))
    with pytest.raises(IdentityRefused, match="role is agent"):
        GpuBrokerHook().status()


class _Flaky(http.server.BaseHTTPRequestHandler):
    answers: list[int]

    def do_GET(self) -> None:
        code = self.answers.pop(0)
        self.send_response(code)
        self.end_headers()
        if code == 200:
            row = {
                "version": "1",
                "leader": None,
                "nodes": 0,
                "devices": 0,
                "free": 0,
                "pending": 0,
                "leases": 0,
            }
            self.wfile.write(json.dumps(row).encode())

    def log_message(self, *_args: object) -> None:
        """Stay quiet."""


@pytest.fixture
def flaky() -> Iterator[tuple[str, type[_Flaky]]]:
    handler = type("Handler", (_Flaky,), {"answers": []})
    server = http.server.HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


def test_a_restarting_broker_is_asked_again(
    flaky: tuple[str, type[_Flaky]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = flaky
    handler.answers = [503, 502, 200]
    connect(monkeypatch, url)
    assert GpuBrokerHook(patience_s=10).status().version == "1"
    assert handler.answers == []


def test_another_server_at_the_address_is_recognised(
    flaky: tuple[str, type[_Flaky]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = flaky
    handler.answers = [404]
    connect(monkeypatch, url)
    with pytest.raises(InvalidRequest, match=r"answered HTTP 404\. Give the URL of the Airflow API server"):
        GpuBrokerHook(patience_s=10).status()


def test_a_pasted_token_may_end_in_a_newline(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    token = mint_token(SECRET, role="task", subject="test", ttl_s=60)
    connect(monkeypatch, f" {base_url}/ \n", token=f"  {token} \n")
    assert GpuBrokerHook(patience_s=0.5).status().nodes == 1


@pytest.mark.parametrize("token", ["eyJ-secret-\u00fc", "eyJ-secret\nx", "eyJ secret"])
def test_what_cannot_be_sent_as_a_token_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    connect(monkeypatch, "http://127.0.0.1:9", token=token)
    with pytest.raises(InvalidRequest, match="airflow gpu token --role task") as refused:
        GpuBrokerHook(patience_s=60).status()
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("host", ["ftp://broker", "http://[::1", "http://", "http://broker:port"])
def test_what_is_no_url_is_refused_with_an_example(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    connect(monkeypatch, host)
    with pytest.raises(
        InvalidRequest, match=r"'gpu_default' is .* no http\(s\) URL\. .*http://localhost:8080"
    ):
        GpuBrokerHook(patience_s=60).status()


def test_https_on_a_port_of_http_is_told_at_once(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, base_url.replace("http://", "https://"))
    with pytest.raises(InvalidRequest, match="does not speak https at that port: write http://"):
        GpuBrokerHook(patience_s=60).status()


def test_an_address_with_too_much_path_is_told_what_to_give(
    base_url: str, flaky: tuple[str, type[_Flaky]], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(monkeypatch, f"{base_url}/gpu/v1")
    with pytest.raises(InvalidRequest, match="up to what comes before /gpu/v1"):
        GpuBrokerHook().nodes()
    url, handler = flaky
    handler.answers = [204]  # a page of something else
    connect(monkeypatch, url)
    with pytest.raises(BrokerUnavailable, match=r"no broker's answer\. Give the URL"):
        GpuBrokerHook().nodes()
