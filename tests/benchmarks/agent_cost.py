"""What the agent costs its host: CPU of one core at one report a second, over real HTTP.

Run ``python -m tests.benchmarks.agent_cost --json``. A broker that answers every report runs in this process,
the agent in another; only the agent's CPU time is counted, after its start-up. Real devices add the time of
the NVML calls, which this does not measure.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.benchmarks.output import show

_ANSWER = b'{"leased": [], "report_interval_s": 1.0}'


class _Broker(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    reports = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).reports += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(_ANSWER)))
        self.end_headers()
        self.wfile.write(_ANSWER)

    def log_message(self, *args: object) -> None:
        """Keep quiet: the output is one JSON object."""


def measure(*, fleet: str, seconds: float) -> dict[str, float | int | str]:
    """Run an agent for some seconds after its start; return what it used."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Broker)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    command = [sys.executable, "-m", "airflow_gpu_provider.inventory.agent", "--url", url]
    agent = subprocess.Popen(
        [*command, "--simulated", fleet],
        env={**os.environ, "GPU_AGENT_TOKEN": "benchmark"},
        stdout=subprocess.DEVNULL,
    )
    try:
        _until_reports(3, agent)
        cpu, wall, reports = _cpu_s(agent.pid), time.monotonic(), _Broker.reports
        time.sleep(seconds)
        used, passed, sent = _cpu_s(agent.pid) - cpu, time.monotonic() - wall, _Broker.reports - reports
        rss_mib = _rss_mib(agent.pid)
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.wait(10)
        server.shutdown()
    return {
        "fleet": fleet,
        "cpu_pct": round(100 * used / passed, 3),
        "cpu_ms_per_report": round(1000 * used / max(1, sent), 3),
        "reports_per_s": round(sent / passed, 3),
        "rss_mib": round(rss_mib, 1),
        "seconds": round(passed, 1),
    }


def _until_reports(count: int, agent: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while _Broker.reports < count:
        if agent.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("The agent does not report; start it by hand to see why.")
        time.sleep(0.05)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    schedstat = Path(f"/proc/{pid}/schedstat")
    if schedstat.exists():  # nanoseconds; the ticks of stat are 10 ms, more than a report costs
        return int(schedstat.read_text().split()[0]) / 1e9
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fleet", default="8xA100-80GB")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(fleet=options.fleet, seconds=options.seconds)
    show(result, as_json=options.json)


if __name__ == "__main__":
    main()
