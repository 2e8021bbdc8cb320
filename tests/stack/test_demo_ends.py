"""However the demo is ended, no process that it started is left. Slow: each case starts a stack."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.airflow_home import ROOT, AirflowHome
from scripts.processes import Process, descendants

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]
ENDS_WITHIN_S = 60


@pytest.fixture
def demo(tmp_path: Path, airflow_home_template: AirflowHome) -> Iterator[subprocess.Popen[bytes]]:
    """A demo at work: some device is leased."""
    AirflowHome(tmp_path / "airflow").take_database_of(airflow_home_template)
    log = tmp_path / "demo.log"
    with log.open("wb") as out:
        running = subprocess.Popen(
            [sys.executable, "-m", "scripts.demo", "--folder", str(tmp_path), "--limit", "4"],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    while " devices leased" not in log.read_text() or "left · 0 of 4" in log.read_text().splitlines()[-1]:
        assert running.poll() is None, log.read_text()
        time.sleep(0.5)
    yield running
    if running.poll() is None:
        running.kill()
    running.wait()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_of_a_demo_that_was_ended(
    demo: subprocess.Popen[bytes], signum: signal.Signals, tmp_path: Path
) -> None:
    state = json.loads((tmp_path / "airflow" / "stack.json").read_text())
    warden = Process(**state["warden"])
    started = [warden, *descendants(warden.pid)]
    assert len(started) > 6, "warden, five programs and their children"
    demo.send_signal(signum)
    code = demo.wait(timeout=ENDS_WITHIN_S)
    assert code == (-signal.SIGKILL if signum == signal.SIGKILL else 130)
    deadline = time.monotonic() + ENDS_WITHIN_S
    while left := [process for process in started if process.is_alive]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
