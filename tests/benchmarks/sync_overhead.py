"""What the supervisor costs while nothing fails, and what sharing every 100 steps saves.

Run ``python -m tests.benchmarks.sync_overhead --json``. The same training runs under the product's launcher,
in a bare torch.distributed loop that averages as often, and in torch's DDP, which shares at every step; the
three take turns, and medians are compared. ``cpu_overhead_pct`` compares processor time instead of the wall
clock, each form's relative to that of the loop's body beside it, because other work on the machine disturbs
that less; the supervisor's is part of the product's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from airflow_gpu_provider.training.process_state import read_process_state
from airflow_gpu_provider.training.run_file import RunState
from tests.benchmarks.output import show
from tests.benchmarks.overhead_workload import BATCH, BLOCK, STEPS
from tests.training.running import Running, make_plan, start

FORMS = ("bare", "product", "ddp")
GIVE_UP_S = 180.0


def run_product(folder: Path, shards: int) -> dict[str, list[float]]:
    """Run under the launcher with all its defaults and a warm spare."""
    running = start(
        make_plan(
            folder,
            shards=shards,
            spares=1,
            sync_interval=BLOCK,
            entrypoint="tests.benchmarks.overhead_workload:train",
            max_respawns=2,
            checkpoint_every_s=30.0,
        )
    )
    try:
        used_s, passed_s = 0.0, 1.0
        running.until(lambda record: record.step >= BLOCK, "the first synchronisation")
        supervisor = running.supervisor()
        before, began = cpu_s(supervisor), time.monotonic()
        while not is_through(running):
            used_s, passed_s = cpu_s(supervisor) - before, time.monotonic() - began
            time.sleep(0.05)
        record = running.end()
    finally:
        running.run.kill()
    assert record.state is RunState.SUCCEEDED and isinstance(record.result, dict), record
    result: dict[str, list[float]] = record.result  # type: ignore[assignment]
    step_s = statistics.median(result["wall_s"])
    result["supervisor_cpu_s"] = [step_s * used_s / passed_s]
    return result


def beside_body(times: dict[str, list[float]], extra_s: float) -> float:
    """Return the processor time of a step that is not the body's, as a part of the body's."""
    steps = zip(times["cpu_s"], times["body_cpu_s"], strict=True)
    return statistics.median((cpu + extra_s) / body - 1 for cpu, body in steps)


def is_through(running: Running) -> bool:
    record = running.run.record()
    return record is None or record.step >= STEPS - BLOCK or record.state.is_terminal


def run_plain(form: str, shards: int) -> dict[str, list[float]]:
    """Run a form that the product has no part in."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.overhead_workload", form, str(shards), str(port)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as the product: the kernel deals processors out to sessions
    )
    try:
        output = process.communicate(timeout=GIVE_UP_S)[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    result: dict[str, list[float]] = json.loads(output.splitlines()[-1])
    return result


def cpu_s(pid: int) -> float:
    """Return the processor time a process has used."""
    state = read_process_state(pid)
    assert state is not None, "the supervisor has ended"
    return state.cpu_s


def measure(shards: int, rounds: int) -> dict[str, Any]:
    """Let the forms take turns and compare."""
    wall: dict[str, list[float]] = {form: [] for form in FORMS}
    beside: dict[str, list[float]] = {form: [] for form in FORMS}
    supervisor: list[float] = []
    with tempfile.TemporaryDirectory(prefix="sync-overhead-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        for number in range(rounds):
            for form in FORMS[number % 3 :] + FORMS[: number % 3]:  # nobody is always the first
                is_product = form == "product"
                times = run_product(folder / str(number), shards) if is_product else run_plain(form, shards)
                wall[form].append(statistics.median(times["wall_s"]))
                extra = times.get("supervisor_cpu_s", [])
                beside[form].append(beside_body(times, sum(extra) / shards))
                supervisor += extra
    step_s = {form: statistics.median(times) for form, times in wall.items()}
    ratio = {form: statistics.median(ratios) for form, ratios in beside.items()}
    return {
        "shards": shards,
        "rounds": rounds,
        "sync_interval": BLOCK,
        "steps": STEPS,
        "overhead_pct": round(100 * (step_s["product"] / step_s["bare"] - 1), 2),
        "overhead_pct_of_rounds": [
            round(100 * (ours / bare - 1), 1)
            for ours, bare in zip(wall["product"], wall["bare"], strict=True)
        ],
        "cpu_overhead_pct": round(100 * (ratio["product"] - ratio["bare"]) / (1 + ratio["bare"]), 2),
        "speedup_k100_over_ddp": round(step_s["ddp"] / step_s["product"], 3),
        "step_ms": {form: round(1000 * seconds, 3) for form, seconds in step_s.items()},
        "cpu_beside_body_pct": {form: round(100 * part, 2) for form, part in ratio.items()},
        "supervisor_cpu_ms_per_step": round(1000 * statistics.median(supervisor), 3),
        "samples_per_s": {form: round(shards * BATCH / seconds, 1) for form, seconds in step_s.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.shards, options.rounds)
    show(result, as_json=options.json)


if __name__ == "__main__":
    main()
