"""The agent as its users run it, against a real HTTP server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from airflow_gpu_provider.exceptions import BrokerUnavailable, IdentityRefused, InvalidRequest
from airflow_gpu_provider.inventory import agent_cli, host
from airflow_gpu_provider.inventory.reporter import HttpReporter, TokenSource
from airflow_gpu_provider.reports import ReportAnswer, ReportBody

EMPTY = ReportBody(nodes=())


class Broker:
    """A broker that takes reports with one token."""

    def __init__(self, port: int = 0) -> None:
        self.token = "right"
        self.status = 200
        self.content = ReportAnswer(report_interval_s=0.05).model_dump_json()
        self.requests: list[tuple[str, dict[str, object]]] = []
        self.connections = 0
        self.is_closed = False
        self.server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        broker = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 5

            def setup(self) -> None:
                super().setup()
                broker.connections += 1

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if broker.is_closed:  # a kept connection must not outlive the server
                    self.close_connection = True
                    return
                broker.requests.append((self.path, body))
                known = self.headers["Authorization"] == f"Bearer {broker.token}"
                content = (broker.content if known else '{"detail": {"message": "unknown token."}}').encode()
                self.send_response(broker.status if known else 401)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        return Handler

    def close(self) -> None:
        self.is_closed = True
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def broker() -> Iterator[Broker]:
    started = Broker()
    yield started
    started.close()


def reporter(broker: Broker, token: str = "right") -> HttpReporter:
    return HttpReporter(broker.url, TokenSource(value=token))


def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_reports_go_over_one_kept_connection(broker: Broker) -> None:
    send = reporter(broker)
    for _ in range(3):
        assert send(EMPTY).report_interval_s == 0.05
    send.close()
    assert [path for path, _ in broker.requests] == ["/gpu/v1/agents/report"] * 3
    assert broker.connections == 1


def test_a_refused_token_is_told_with_what_to_do(broker: Broker) -> None:
    with pytest.raises(IdentityRefused, match=r"\(HTTP 401: unknown token\)\. Mint another") as caught:
        reporter(broker, "wrong")(EMPTY)
    assert "wrong" not in caught.value.message


def test_a_renewed_token_file_is_taken_up(broker: Broker, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")
    broker.token = "old"
    send = HttpReporter(broker.url, TokenSource(file=file))
    send(EMPTY)
    broker.token = "new"
    file.write_text("new\n")
    send(EMPTY)
    assert len(broker.requests) == 3


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (503, "HTTP 503"),
        (404, "Give the URL"),
        (405, "Give the URL"),
        (422, "different versions"),
        (307, "HTTP 307"),
    ],
)
def test_whatever_may_heal_is_an_outage(broker: Broker, status: int, words: str) -> None:
    broker.status = status
    with pytest.raises(BrokerUnavailable, match=words):
        reporter(broker)(EMPTY)


def test_an_answer_of_something_else_is_an_outage(broker: Broker) -> None:
    broker.content = "<html>hello</html>"
    with pytest.raises(BrokerUnavailable, match="no broker's answer"):
        reporter(broker)(EMPTY)


def test_a_broker_that_is_down_is_an_outage() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(BrokerUnavailable, match="refused"):
            HttpReporter(url, TokenSource(value="x"))(EMPTY)


@pytest.mark.parametrize("url", ["", "localhost:8080", "ftp://broker", "http://"])
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="no http\\(s\\) URL"):
        HttpReporter(url, TokenSource(value="x"))


@pytest.mark.parametrize("value", [None, "", " \n", "two\nlines"])
def test_a_missing_or_broken_token_is_refused(value: str | None) -> None:
    with pytest.raises(InvalidRequest, match="GPU_AGENT_TOKEN"):
        TokenSource(value=value).read()


def test_a_missing_token_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No such file"):
        TokenSource(file=tmp_path / "nothing").read()


def test_the_host_is_named_by_the_variable_or_by_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_HOST", " worker-7 ")
    assert host.local_host() == "worker-7"
    monkeypatch.setenv("GPU_HOST", "")
    assert host.local_host() == socket.gethostname()


def test_the_load_is_a_share_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert host.cpu_load(tmp_path) is None
    for text, load in (("2.00 9 9 1/1 1", 0.25), ("80.0 9 9 1/1 1", 1.0), ("", None)):
        (tmp_path / "loadavg").write_text(text)
        assert host.cpu_load(tmp_path) == load


def run_once(*options: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = agent_cli.main(["--once", *options])
    out, err = capsys.readouterr()
    return code, out, err


def test_labels_of_the_command_line_are_in_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--print", "--simulated", "a:1xA100;b:1xA100", "--label", "rack=r1", "--label", "zone = p"]
    _, out, _ = run_once(*options, capsys=capsys)
    told = [node["labels"] for node in json.loads(out)["nodes"]]
    assert told == [{"simulated": "true", "rack": "r1", "zone": "p"}] * 2


@pytest.mark.parametrize("label", ["rack", "rack=", "=r1", f"rack={'x' * 251}"])
def test_a_label_without_name_or_value_is_refused(label: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        agent_cli.main(["--once", "--print", "--label", label])
    assert stopped.value.code == 2
    assert "write NAME=VALUE" in capsys.readouterr().err


def test_once_prints_the_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_once("--print", "--simulated", "a:1xA100", "--host", "h", capsys=capsys)
    body = ReportBody.model_validate_json(out)
    assert code == 0 and "SIMULATED" in err
    assert [(node.name, node.host) for node in body.nodes] == [("a", "h")]


def test_models_that_are_not_built_in_can_be_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = '{"Q1": {"memory": "48GiB", "rating": 29}}'
    (tmp_path / "flavors.json").write_text(own)
    options = ["--print", "--host", "h", "--simulated", "1xQ1"]
    assert "'Q1' is no known model" in run_once(*options, capsys=capsys)[2]
    code, out, _ = run_once(*options, "--flavors", str(tmp_path / "flavors.json"), capsys=capsys)
    (device,) = json.loads(out)["nodes"][0]["devices"]
    assert (code, device["model"], device["memory_mib"], device["tflops"]) == (0, "Q1", 49_152, 29.0)
    monkeypatch.setenv("AIRFLOW__GPU__FLAVORS", own)
    assert run_once(*options, capsys=capsys)[0] == 0
    missing = run_once(*options, "--flavors", str(tmp_path / "none"), capsys=capsys)
    assert missing[0] == 2 and "cannot be read: No such file" in missing[2]
    (tmp_path / "flavors.json").write_bytes(own.encode("utf-16"))
    utf16 = run_once(*options, "--flavors", str(tmp_path / "flavors.json"), capsys=capsys)
    assert utf16[0] == 2 and "is no UTF-8 text (byte 1): save it as JSON in UTF-8" in utf16[2]


def test_an_interval_that_is_no_number_is_refused_with_what_is_possible(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        agent_cli.main(["--interval", "abc"])
    assert "'abc' is no number of seconds; from 0.05 to 60 are possible" in capsys.readouterr().err


def test_auto_falls_back_to_two_announced_nodes(
    broker: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_AGENT_TOKEN", "right")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    options = ("--url", broker.url, "--simulated", "auto", "--host", "pc")
    code, out, _ = run_once(*options, capsys=capsys)
    assert code == 0
    assert "SIMULATED" in out and "not installed" in out and "runs on the CPU" in out
    ((_, body),) = broker.requests
    nodes = ReportBody.model_validate(body).nodes
    assert [(node.name, node.host, [d.model for d in node.devices]) for node in nodes] == [
        ("pc-a100", "pc", ["A100", "A100"]),
        ("pc-v100", "pc", ["V100", "V100"]),
    ]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--simulated", "1xA100"], 2, "--url is missing"),
        (["--print", "--simulated", "nonsense"], 2, "Examples"),
        (["--print", "--faults", "f.json"], 2, "add --simulated"),
        (["--url", "{url}", "--token-file", "/nonexistent/token"], 2, "cannot be read"),
    ],
)
def test_wrong_arguments_are_one_sentence_and_exit_code_2(
    options: list[str], code: int, words: str, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    got, _, err = run_once(*(each.format(url=broker.url) for each in options), capsys=capsys)
    assert got == code and words in err and "Traceback" not in err


def start_agent(url: str, *, token: str = "right") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "airflow_gpu_provider.inventory.agent", "--url", url]
    return subprocess.Popen(
        [*command, "--simulated", "8xA100"],
        env={**os.environ, "GPU_AGENT_TOKEN": token},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_agent_outlives_an_outage_and_stops_cleanly_on_a_signal(number: signal.Signals) -> None:
    first = Broker()
    process = start_agent(first.url)
    try:
        until(lambda: len(first.requests) >= 2)
        first.close()
        time.sleep(0.3)
        second = Broker(first.port)
        until(lambda: len(second.requests) >= 2)
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait()
    second.close()
    assert process.returncode == 0 and "SIMULATED" in out
    assert err.count("Trying again") == 1 and err.count("answers again") == 1, err
    assert "Traceback" not in err


def test_the_agent_stops_with_code_2_when_its_token_is_wrong(broker: Broker) -> None:
    process = start_agent(broker.url, token="stolen")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 2 and "refused this agent's token" in err
    assert "Traceback" not in err and "stolen" not in err


def test_the_agent_starts_without_airflow_or_anything_heavy() -> None:
    code = (
        "import sys; from airflow_gpu_provider.inventory import agent_cli, nvml, simulated; "
        "print(sorted({'airflow', 'torch', 'sqlalchemy', 'fastapi', 'pynvml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
