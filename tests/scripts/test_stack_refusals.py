"""A stack that cannot start says why in one sentence and leaves nothing behind."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from scripts import ports
from scripts.airflow_home import ROOT, AirflowHome
from scripts.errors import StackError
from scripts.rest import AirflowApi
from scripts.stack import Stack, StackOptions


def test_a_full_disk_is_said_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 40 * 2**20))
    stack = Stack(StackOptions(home=AirflowHome(tmp_path / "home")))
    with pytest.raises(StackError, match="40 MiB free, 500 are needed"):
        stack.start()
    assert not stack.is_ours


def test_a_busy_port_is_said_before_the_start(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((ports.HOST, 0))
        taken.listen()
        stack = Stack(StackOptions(home=AirflowHome(tmp_path / "home"), port=taken.getsockname()[1]))
        with pytest.raises(StackError, match="already in use"):
            stack.start()
    assert not stack.is_ours


def test_ending_where_nothing_runs_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.background", "down", "--home", str(tmp_path / "home")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "no stack was running")


def test_a_server_that_is_away_is_unhealthy_and_not_an_exception() -> None:
    api = AirflowApi(f"http://{ports.HOST}:{ports.claim(None)}", "admin", "wrong")
    assert api.unhealthy() == ["api-server"]
    api.close()


def test_the_homes_environment_takes_nothing_from_the_users_airflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    monkeypatch.setenv("AIRFLOW_CONN_GPU_DEFAULT", "gpu://elsewhere")
    environment = AirflowHome(tmp_path / "home").environment()
    assert "AIRFLOW__CORE__EXECUTOR" not in environment
    assert "AIRFLOW_CONN_GPU_DEFAULT" not in environment
    assert environment["AIRFLOW_HOME"] == str(tmp_path / "home")


def test_secrets_are_made_once_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    home = AirflowHome(tmp_path / "home")
    assert home.secrets() == home.secrets()
    assert (home.path / "secrets.json").stat().st_mode & 0o077 == 0
