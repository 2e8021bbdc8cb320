"""The warden ends all that a stack ever started, whoever dies first. Real processes, no Airflow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.airflow_home import ROOT
from scripts.processes import Process
from scripts.stack import end_leftovers, explain
from scripts.warden import Command, Plan

# A program that behaves as badly as it can: it leaves its session and its parent, and is deaf to SIGTERM.
ESCAPING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
time.sleep(600)
"""
OWNER = """
import subprocess, sys, time
warden = subprocess.Popen([sys.executable, "-m", "scripts.warden"], stdin=subprocess.PIPE, text=True,
                          start_new_session=True)
warden.stdin.write(sys.argv[1] + "\\n")
warden.stdin.flush()
time.sleep(600)
"""
PLAIN = "import time; time.sleep(600)"


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited 30 s for: {what}"
        time.sleep(0.02)


class Yard:
    """A folder with the state of one warden, and all processes that it ever named."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state_file = folder / "stack.json"

    def plan(self, *programs: list[str], detached: bool = False, setup: tuple[list[str], ...] = ()) -> Plan:
        def commands(kind: str, argvs: tuple[list[str], ...]) -> list[Command]:
            return [
                Command(f"{kind}-{i}", argv, str(self.folder / f"{kind}-{i}.log"))
                for i, argv in enumerate(argvs)
            ]

        return Plan(
            state_file=str(self.state_file),
            lock_file=str(self.folder / "stack.lock"),
            detached=detached,
            setup=commands("setup", setup),
            processes=commands("program", programs),
            grace_s=1.0,
        )

    def state(self) -> dict[str, Any]:
        return dict(json.loads(self.state_file.read_text())) if self.state_file.exists() else {}

    def named(self) -> list[Process]:
        return [Process(**process) for process in self.state().get("processes", ())]

    def start(self, plan: Plan) -> subprocess.Popen[str]:
        warden = subprocess.Popen(
            [sys.executable, "-m", "scripts.warden"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert warden.stdin is not None
        warden.stdin.write(plan.to_json() + "\n")
        warden.stdin.flush()
        return warden

    def wait_for_escaped(self) -> list[Process]:
        """Return the two processes of ESCAPING, once the state file names the one that got away."""
        pid_file = self.folder / "escaped"
        wait_until(lambda: pid_file.exists() and pid_file.read_text(), "the escaping process")
        pid = int(pid_file.read_text())
        wait_until(lambda: pid in {p.pid for p in self.named()}, "the census")
        return self.named()


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    return Yard(tmp_path)


def test_closing_the_pipe_ends_even_a_process_that_left_its_session_and_is_deaf(
    yard: Yard,
) -> None:
    warden = yard.start(yard.plan(python(ESCAPING, str(yard.folder / "escaped"))))
    processes = yard.wait_for_escaped()
    assert len(processes) == 2
    assert warden.stdin is not None
    warden.stdin.close()
    assert warden.wait(timeout=30) == 0
    assert not [process for process in processes if process.is_alive]
    assert yard.state()["phase"] == "stopped"


def test_a_killed_owner_leaves_no_process_behind(yard: Yard) -> None:
    plan = yard.plan(python(ESCAPING, str(yard.folder / "escaped")), python(PLAIN))
    owner = subprocess.Popen(python(OWNER, plan.to_json()), cwd=ROOT)
    processes = [*yard.wait_for_escaped(), Process(**yard.state()["warden"])]
    assert len(processes) == 4
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: not any(process.is_alive for process in processes), "all processes to end")


def test_leftovers_of_a_killed_warden_are_found_by_its_state_file(yard: Yard) -> None:
    warden = yard.start(yard.plan(python(ESCAPING, str(yard.folder / "escaped"))))
    processes = yard.wait_for_escaped()
    warden.kill()
    warden.wait()
    assert [process for process in processes if process.is_alive], "one got away, or this test proves nothing"
    end_leftovers(yard.state())
    assert not [process for process in processes if process.is_alive]


def test_a_reused_pid_is_not_taken_for_a_leftover() -> None:
    me = {"pid": os.getpid(), "started": 1}
    end_leftovers({"warden": me, "processes": [me]})  # would end pytest


def test_one_process_that_dies_ends_the_stack_and_is_named(yard: Yard) -> None:
    dying = python("import sys; print('no room on the ship'); sys.exit(3)")
    warden = yard.start(yard.plan(python(PLAIN), dying))
    assert warden.wait(timeout=30) == 1
    state = yard.state()
    assert state["failure"] == "program-1 ended with code 3"
    assert not yard.named()
    assert "no room on the ship" in explain(state["failure"], yard.folder)


def test_a_process_that_is_killed_after_it_worked_is_started_again(yard: Yard) -> None:
    warden = yard.start(replace(yard.plan(python(PLAIN), python(PLAIN)), settled_s=0.5))
    wait_until(lambda: len(yard.named()) == 2, "both run")
    time.sleep(1)
    before = {process.pid for process in yard.named()}
    killed = yard.state()["programs"]["program-1"]["pid"]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: len({p.pid for p in yard.named()} - before) == 1, "it runs again")
    state = yard.state()
    assert state["failure"] is None
    assert {each["pid"] for each in state["programs"].values()} == {p.pid for p in yard.named()}
    assert warden.poll() is None


def test_programs_start_only_after_a_setup_step_that_succeeded(yard: Yard) -> None:
    warden = yard.start(yard.plan(python(PLAIN), setup=(python("raise SystemExit(5)"),)))
    assert warden.wait(timeout=30) == 1
    assert yard.state()["failure"] == "setup-0 ended with code 5"
    assert not (yard.folder / "program-0.log").exists()


def test_a_detached_stack_outlives_its_starter_and_ends_on_sigterm(yard: Yard) -> None:
    warden = yard.start(yard.plan(python(PLAIN), detached=True))
    wait_until(yard.named, "the program")
    assert warden.stdin is not None
    warden.stdin.close()
    time.sleep(1.0)
    assert warden.poll() is None
    warden.terminate()
    assert warden.wait(timeout=30) == 0
    assert not yard.named()


def test_a_second_warden_is_refused_while_the_first_lives(yard: Yard) -> None:
    first = yard.start(yard.plan(python(PLAIN)))
    wait_until(yard.named, "the program")
    second = yard.start(yard.plan(python(PLAIN)))
    assert second.wait(timeout=30) == 2
    assert first.poll() is None
    first.terminate()
    assert first.wait(timeout=30) == 0
