"""Processes that SIGKILL does not end, as one that sleeps in a driver: nobody waits for them for ever.

A real one, without a driver: a process that another one traces stays until the tracer lets it go.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from airflow_gpu_provider.training.endings import end_children
from airflow_gpu_provider.training.failures import FailureCause
from airflow_gpu_provider.training.plan import Slot
from airflow_gpu_provider.training.run_file import RunState
from tests.training.oracle import expected_weights
from tests.training.running import ROOT, Running, is_alive

_SEIZE, _STOP_AT_EXIT = 0x4206, 0x40
TRACER = f"""
import ctypes, sys, time
trace = ctypes.CDLL(None, use_errno=True).ptrace
trace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
print(trace({_SEIZE}, int(sys.argv[1]), None, {_STOP_AT_EXIT}), flush=True)
time.sleep(600)
"""


@contextmanager
def immortal(pid: int) -> Iterator[None]:
    """Let no signal end a process while the block lasts."""
    tracer = subprocess.Popen([sys.executable, "-c", TRACER, str(pid)], stdout=subprocess.PIPE, text=True)
    assert tracer.stdout is not None
    try:
        if tracer.stdout.readline().strip() != "0":
            pytest.skip("this system does not let one process trace another")
        yield
    finally:
        tracer.kill()
        tracer.wait()
        tracer.stdout.close()


@pytest.fixture
def forever() -> Iterator[ExitStack]:
    """Return what ends immortality again."""
    with ExitStack() as stack:
        yield stack


def slot(device: str) -> Slot:
    return Slot(device_ids=(device,))


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def test_what_does_not_end_is_told_within_a_bound_and_what_is_spared_lives() -> None:
    stays, ends = subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"])
    spared = children() - {stays.pid, ends.pid}
    with immortal(stays.pid):
        spared |= children() - {stays.pid, ends.pid}
        began_at = time.monotonic()
        staying = end_children(spared=spared, within_s=0.5)
        assert time.monotonic() - began_at < 10
        assert list(staying) == [stays.pid] and not is_alive(ends.pid)
        assert f"{stays.pid} (sleep) has not ended 0.5 s after SIGKILL: state t" in staying[stays.pid]
        assert all(is_alive(pid) for pid in spared)
    assert end_children(spared=spared, within_s=20) == {}
    assert (stays.wait(), ends.wait()) == (0, 0), "reaped there"


def test_a_shard_that_does_not_end_loses_its_rank_and_its_device_is_suspect(
    training: Callable[..., Running], forever: ExitStack
) -> None:
    running = training(
        member_slots=(slot("GPU-a"), slot("GPU-b")),
        spare_slots=(slot("GPU-c"),),
        max_respawns=2,
        fence_timeout_s=1,
        heartbeat_timeout_s=1,
        params={"pause_s": 0.05},
    )
    running.until(lambda record: record.step >= 10 and record.warm == ["u2"], "a warm spare")
    forever.enter_context(immortal(running.pid_of_rank(1)))
    running.hurt(1, signal.SIGKILL)
    record = running.end()
    assert record.state is RunState.SUCCEEDED and record.takeovers == ["u2 took rank 1 of u1"]
    assert record.checkpoint is not None and record.checkpoint.state_sha256 == expected_weights(10)
    (failure,) = record.failures
    assert failure.cause is FailureCause.HUNG
    assert "(shard-u1) has not ended 1 s after SIGKILL: state t" in failure.evidence
    assert record.suspect_devices == ["GPU-b"]
    assert record.processes_started == 3, "nothing is started where it was"
    assert "nothing is started in its place" in " ".join(note.sentence for note in record.notes)


def test_a_run_whose_supervisor_is_lost_ends_where_a_shard_stays(
    training: Callable[..., Running], forever: ExitStack
) -> None:
    running = training(
        member_slots=(slot("GPU-a"), slot("GPU-b")), fence_timeout_s=1, params={"pause_s": 0.05}
    )
    running.until_step(10)
    forever.enter_context(immortal(running.pid_of_rank(1)))
    os.kill(running.supervisor(), signal.SIGKILL)
    record = running.end()
    assert record.state is RunState.FAILED and not record.hopeless
    assert record.suspect_devices == ["GPU-b"] and record.supervisor_restarts == 0
    assert "(shard-u1) has not ended 1 s after SIGKILL" in str(record.error)


def test_a_rank_of_a_script_that_does_not_end_is_started_again_elsewhere(
    training: Callable[..., Running], forever: ExitStack
) -> None:
    from airflow_gpu_provider.training.script import read_script

    running = training(
        entrypoint=None,
        script=read_script("plain.py", ["wait_then_end"], dag_folder=ROOT / "tests/training/scripts"),
        member_slots=(slot("GPU-a"), slot("GPU-b")),
        spare_slots=(slot("GPU-c"),),
        max_respawns=1,
        fence_timeout_s=1,
    )
    waits = [running.plan.paths.log(uid) for uid in ("u0", "u1")]
    running.until(lambda _: all(log.exists() and "waits" in log.read_text() for log in waits), "both ranks")
    forever.enter_context(immortal(running.pids()["u0"]))
    os.kill(running.pids()["u1"], signal.SIGKILL)
    record = running.end()
    assert record.state is RunState.SUCCEEDED and record.suspect_devices == ["GPU-a"]
    assert record.takeovers == ["restart 1 of all processes after the loss of u1; rank 0 moved to GPU-c"]
