"""The installation knows when it is needed, and says in one sentence why it cannot go on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest

from scripts import install


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of its own with a Python that says yes to everything in place of the environment's."""
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "constraints.txt").write_text("a==1\n")
    venv = tmp_path / ".venv"
    for name, value in {
        "ROOT": tmp_path,
        "VENV": venv,
        "PYTHON": venv / "bin" / "python",
        "STAMP": venv / "installed.json",
        "UNDER_WAY": venv / "installation-under-way",
        "CONSTRAINTS": tmp_path / "constraints.txt",
    }.items():
        monkeypatch.setattr(install, name, value)
    return tmp_path


@pytest.fixture
def commands(project: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record what would be run; `venv` makes the folder."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        ran.append(command)
        if command[1:3] == ["-m", "venv"]:
            (project / ".venv" / "bin").mkdir(parents=True)
            (project / ".venv" / "bin" / "python").touch()
        elif not Path(command[0]).exists():
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return ran


def run_main(monkeypatch: pytest.MonkeyPatch, *groups: str) -> int:
    monkeypatch.setattr(sys, "argv", ["install.py", *groups])
    return install.main()


def test_a_finished_installation_costs_nothing(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_main(monkeypatch, "examples", "test") == 0
    assert any("--editable" in command for command in commands)
    commands.clear()
    assert run_main(monkeypatch, "test") == 0
    assert commands == []


def test_a_further_group_or_other_pins_install_again(
    commands: list[list[str]], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_main(monkeypatch, "examples")
    commands.clear()
    run_main(monkeypatch, "test")
    (last,) = [command for command in commands if "--editable" in command]
    assert last[-4:] == ["--group", "examples", "--group", "test"], "a group once installed stays"
    commands.clear()
    (project / "constraints.txt").write_text("a==2\n")
    run_main(monkeypatch, "test")
    assert any("--editable" in command for command in commands)


def test_an_installation_that_was_cut_short_begins_anew(
    commands: list[list[str]], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_main(monkeypatch, "examples")
    half_written = project / ".venv" / "half-written"
    half_written.touch()
    (project / ".venv" / "installation-under-way").touch()
    (project / ".venv" / "installed.json").unlink()
    assert run_main(monkeypatch, "examples") == 0
    assert not half_written.exists()
    assert json.loads((project / ".venv" / "installed.json").read_text())["groups"] == ["examples"]


def test_a_wrong_python_is_refused_with_what_to_install(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "OLDEST", (3, 99))
    assert run_main(monkeypatch, "examples") == 1
    assert "install Python 3.99" in capsys.readouterr().err
    assert commands == []


def test_a_full_disk_is_said_before_anything_is_written(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 10**9))
    assert run_main(monkeypatch, "examples") == 1
    assert "0.9 GiB free, 5 are needed" in capsys.readouterr().err
    assert commands == []


def test_a_failing_pip_is_tried_again_and_then_reported(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    succeed = subprocess.run

    def fail_to_install(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        result = succeed(command, **options)  # type: ignore[call-overload]
        return subprocess.CompletedProcess(command, 1 if "--editable" in command else result.returncode)

    monkeypatch.setattr(subprocess, "run", fail_to_install)
    assert run_main(monkeypatch, "examples") == 1
    assert sum("--editable" in command for command in commands) == install.PIP_TRIES
    assert "pip ended with code 1" in capsys.readouterr().err


def test_a_second_installation_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "ROOT", tmp_path)
    order: list[str] = []

    def second() -> None:
        with install.alone():
            order.append("second")

    thread = threading.Thread(target=second)
    with install.alone():
        thread.start()
        time.sleep(0.3)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
