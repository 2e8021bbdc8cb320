"""Holders, outsiders and leftovers, with real processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from airflow_gpu_provider.inventory.leftovers import GRACE_S, KILL_AFTER_S, Leftovers
from airflow_gpu_provider.inventory.processes import ProcTable
from airflow_gpu_provider.reports import DeviceReport, NodeReport

ROOT = Path(__file__).parents[2]
Start = Callable[..., subprocess.Popen[bytes]]

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
PARENT = f"import os, subprocess, sys; env = dict(os.environ); env.pop('GPU_LEASE_ID'); \
child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], env=env, stdout=subprocess.PIPE); \
child.stdout.readline(); print(child.pid, flush=True); child.wait()"

MARKING = "import sys; from airflow_gpu_provider.inventory.lease_mark import lease_mark; \
mark = lease_mark('lease-late'); mark.__enter__(); print('up', flush=True); \
sys.stdin.readline(); mark.__exit__(None, None, None); print('down', flush=True); sys.stdin.readline()"


#: PR_SET_NAME: what the kernel shows of a program of that name
MPS_SERVER = "import ctypes; ctypes.CDLL(None).prctl(15, b'nvidia-cuda-mps'); " + SLEEP


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a Python process that carries a lease, and wait until it runs."""
    started: list[subprocess.Popen[bytes]] = []

    def run(lease_id: str | None, code: str = SLEEP) -> subprocess.Popen[bytes]:
        env = {key: value for key, value in os.environ.items() if key != "GPU_LEASE_ID"}
        if lease_id is not None:
            env["GPU_LEASE_ID"] = lease_id
        command = [sys.executable, "-S", "-c", code]
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd=ROOT
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def node_with(*pids: int, simulated: bool = False) -> tuple[NodeReport, ...]:
    device = DeviceReport(
        id="GPU-1", model="A100", memory_mib=1, tflops=1, foreign_pids=pids, simulated=simulated
    )
    return (NodeReport(name="a", host="a", cpu_cores=1, memory_mib=1, devices=(device,)),)


def outsiders(leftovers: Leftovers, *pids: int, now: float) -> tuple[int, ...]:
    (node,) = leftovers.strike_out_holders(node_with(*pids), now)
    return node.devices[0].foreign_pids


def is_alive(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


def test_a_holder_is_no_outsider_and_a_stranger_is(start: Start) -> None:
    holder, stranger = start("lease-1"), start(None)
    first_line(holder), first_line(stranger)
    leftovers = Leftovers()
    leftovers.learn({"GPU-1": frozenset({"lease-1"})}, now=0.0)
    for now in (0.0, 10 * GRACE_S):
        leftovers.learn({"GPU-1": frozenset({"lease-1"})}, now=now)
        assert outsiders(leftovers, holder.pid, stranger.pid, now=now) == (stranger.pid,)
    assert is_alive(holder) and is_alive(stranger), "a foreign process is never touched"


def test_who_shares_a_device_stays_when_another_lease_of_it_ends(start: Start) -> None:
    stays, overstays = start("lease-1"), start("lease-2")
    first_line(stays), first_line(overstays)
    leftovers = Leftovers()
    leftovers.learn({"GPU-1": frozenset({"lease-1", "lease-2"})}, now=0.0)
    assert outsiders(leftovers, stays.pid, overstays.pid, now=0.0) == ()
    for now in (1.0, 1.0 + GRACE_S):
        leftovers.learn({"GPU-1": frozenset({"lease-1"})}, now=now)
        assert outsiders(leftovers, stays.pid, overstays.pid, now=now) == (overstays.pid,)
    overstays.wait(5)
    assert is_alive(stays)


def test_the_server_of_mps_is_no_outsider(start: Start) -> None:
    server = start(None, MPS_SERVER)
    first_line(server)
    assert outsiders(Leftovers(), server.pid, now=0.0) == ()


def test_a_process_that_got_its_lease_while_it_ran_shows_it_as_long_as_it_holds_it(start: Start) -> None:
    process = start("lease-of-its-start", MARKING)
    assert first_line(process) == "up"
    leftovers = Leftovers()
    leftovers.learn({"GPU-1": frozenset({"lease-late"})}, now=0.0)
    assert outsiders(leftovers, process.pid, now=0.0) == ()
    assert process.stdin is not None
    process.stdin.write(b"end\n")
    process.stdin.flush()
    assert first_line(process) == "down"
    seen = ProcTable().look(process.pid)
    assert seen is not None and seen.lease_id == "lease-of-its-start"


def test_a_child_that_lost_its_environment_belongs_to_its_ancestors_lease(start: Start) -> None:
    parent = start("lease-1", PARENT)
    child = int(first_line(parent))
    process = ProcTable().look(child)
    assert process is not None and process.lease_id == "lease-1" and process.inherited
    leftovers = Leftovers()
    leftovers.learn({"GPU-1": frozenset({"lease-1"})}, now=0.0)
    assert outsiders(leftovers, child, now=0.0) == ()


def test_a_child_without_the_variable_of_its_own_is_reported_but_never_ended(start: Start) -> None:
    parent = start("lease-1", PARENT)
    child = int(first_line(parent))
    leftovers = Leftovers()
    for now in (0.0, 10 * GRACE_S, 20 * GRACE_S):
        leftovers.learn({}, now=now)
        found = outsiders(leftovers, child, now=now)
    assert found == (child,)
    os.kill(child, 0)


def test_a_leftover_is_reported_at_once_and_ended_after_its_grace(start: Start) -> None:
    process = start("lease-1")
    first_line(process)
    leftovers = Leftovers()
    leftovers.learn({"GPU-1": frozenset({"lease-1"})}, now=0.0)
    leftovers.learn({}, now=1.0)
    assert outsiders(leftovers, process.pid, now=1.0) == (process.pid,), "its device is not clean"
    leftovers.learn({}, now=1.0 + GRACE_S - 0.1)
    outsiders(leftovers, process.pid, now=1.0 + GRACE_S)
    assert is_alive(process), "it still had time to stop by itself"
    leftovers.learn({}, now=1.0 + GRACE_S)
    outsiders(leftovers, process.pid, now=1.0 + GRACE_S)
    assert process.wait(5) == -signal.SIGTERM
    assert outsiders(leftovers, process.pid, now=3.0 + GRACE_S) == () or not ProcTable()._sees_host


def test_a_leftover_that_ignores_the_request_is_killed(start: Start) -> None:
    process = start("lease-1", STUBBORN)
    first_line(process)
    leftovers = Leftovers()
    start_s = 100.0
    outsiders(leftovers, process.pid, now=start_s)
    leftovers.learn({}, now=start_s + GRACE_S)
    outsiders(leftovers, process.pid, now=start_s + GRACE_S)
    outsiders(leftovers, process.pid, now=start_s + GRACE_S + KILL_AFTER_S - 0.1)
    time.sleep(0.05)
    assert is_alive(process)
    outsiders(leftovers, process.pid, now=start_s + GRACE_S + KILL_AFTER_S)
    assert process.wait(5) == -signal.SIGKILL


def test_the_first_second_of_a_new_lease_is_no_offence(start: Start) -> None:
    process = start("lease-new")
    first_line(process)
    leftovers = Leftovers()
    leftovers.learn({}, now=0.0)
    assert outsiders(leftovers, process.pid, now=0.5) == (), "no answer could name its lease yet"
    leftovers.learn({"GPU-1": frozenset({"lease-new"})}, now=1.0)
    leftovers.learn({"GPU-1": frozenset({"lease-new"})}, now=10 * GRACE_S)
    assert outsiders(leftovers, process.pid, now=10 * GRACE_S) == ()
    assert is_alive(process)


def test_nobody_is_condemned_while_the_broker_is_silent(start: Start) -> None:
    process = start("lease-new")
    first_line(process)
    leftovers = Leftovers()
    leftovers.learn({}, now=0.0)
    for now in (0.5, 100 * GRACE_S, 200 * GRACE_S):
        assert outsiders(leftovers, process.pid, now=now) == ()
    assert is_alive(process)


def test_a_process_that_is_gone_is_no_outsider() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    process.wait()
    table = ProcTable()
    table._sees_host = True
    assert outsiders(Leftovers(table), process.pid, now=0.0) == ()


def test_a_pid_unseen_from_a_container_counts_against_a_free_device_only() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    process.wait()
    table = ProcTable()
    table._sees_host = False
    leftovers = Leftovers(table)
    assert outsiders(leftovers, process.pid, now=0.0) == (process.pid,)
    leftovers.learn({"GPU-1": frozenset({"lease-1"})}, now=1.0)
    assert outsiders(leftovers, process.pid, now=1.0) == ()


def test_a_zombie_holds_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, not reaped
    table = ProcTable()
    table._sees_host = True
    assert table.look(process.pid) is None
    process.wait()


def test_a_pid_that_was_given_to_another_process_is_not_signalled(start: Start) -> None:
    process = start("lease-1")
    first_line(process)
    table = ProcTable()
    seen = table.look(process.pid)
    assert seen is not None
    impostor = type(seen)(seen.pid, seen.started - 1, seen.lease_id)
    assert table.signal(impostor, signal.SIGKILL) is False
    assert is_alive(process)
    assert table.signal(seen, signal.SIGKILL) is True
    assert process.wait(5) == -signal.SIGKILL


def test_pids_of_a_simulated_device_are_passed_on_unjudged() -> None:
    (node,) = Leftovers().strike_out_holders(node_with(1, simulated=True), 0.0)
    assert node.devices[0].foreign_pids == (1,)
