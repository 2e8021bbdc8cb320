"""What the supervisor costs while nothing fails, and what sharing every 100 steps saves.

Run ``python -m tests.benchmarks.sync_overhead --json``. The same training runs under the product's launcher,
in a bare torch.distributed loop that averages as often, and in torch's DDP, which shares at every step. All
three are started once; then one trains for a block of steps while the others are stopped with all their
processes, in turns, so that other work on the machine disturbs all alike. Each round gives one ratio of
neighbours in time; the median is the figure, and its interval says what the noise leaves of it.
``cpu_overhead_pct`` compares the processor time of all processes of a form in the same way. What the product
spends by the second (supervisor, spare, heartbeats) counts the more, the longer a step takes on a busy
machine; ``overhead_on_free_cores_pct`` adds what a step costs the main threads more, and those seconds as if
a step took its processor time only. ``--product-interval 1`` lets the product share gradients at each step.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_gpu_provider.training.parenthood import living_in_group
from tests.benchmarks.output import show
from tests.benchmarks.overhead_workload import BATCH, BLOCK, Counter
from tests.training.running import make_plan, start

FORMS = ("bare", "product", "ddp")
START_S = 180.0
_GIVE_UP_S = 120.0
_POLL_S = 0.001


@dataclass(frozen=True)
class Block:
    """What a block of steps took, by the step, and by the second what did not train."""

    wall_s: float
    cpu_s: float
    main_cpu_s: float  #: of the threads that train
    beside: float  #: processors used by all other threads


class Form:
    """One running form: a process group that trains only while it is let."""

    def __init__(self, group: int, counter: Counter) -> None:
        self._group = group
        self._counter = counter
        self._trains: set[int] = set()

    def warm_up(self) -> None:
        """Let it train two blocks, then stop it."""
        self._wait_for(BLOCK, START_S)
        before = self._threads()
        self._wait_for(2 * BLOCK, START_S)
        os.killpg(self._group, signal.SIGSTOP)
        used = {thread: cpu_s - before.get(thread, 0.0) for thread, cpu_s in self._threads().items()}
        self._trains = {thread for thread, cpu_s in used.items() if cpu_s > 0.5 * max(used.values())}

    def train_block(self) -> Block:
        """Let it train a block and say what that took."""
        begun, before, began_at = self._counter.read(), self._threads(), time.perf_counter()
        os.killpg(self._group, signal.SIGCONT)
        self._wait_for(begun + BLOCK, _GIVE_UP_S)
        passed_s = time.perf_counter() - began_at
        os.killpg(self._group, signal.SIGSTOP)
        steps = self._counter.read() - begun
        used = {thread: cpu_s - before.get(thread, 0.0) for thread, cpu_s in self._threads().items()}
        main_s = sum(cpu_s for thread, cpu_s in used.items() if thread in self._trains)
        all_s = sum(used.values())
        return Block(passed_s / steps, all_s / steps, main_s / steps, (all_s - main_s) / passed_s)

    def _wait_for(self, step: int, give_up_s: float) -> None:
        deadline = time.monotonic() + give_up_s
        while self._counter.read() < step:
            assert time.monotonic() < deadline, f"step {step} was not reached in {give_up_s} s"
            time.sleep(_POLL_S)

    def _threads(self) -> dict[int, float]:
        """Return the processor time of each thread, exact since the kernel counts in nanoseconds."""
        found = {}
        for pid in living_in_group(self._group):
            for task in Path(f"/proc/{pid}/task").iterdir():
                found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        return found


@contextmanager
def running(form: str, shards: int, folder: Path, interval: int) -> Iterator[Form]:
    """Start a form; nothing of it outlives the block."""
    counter = folder / form
    reader = Counter(counter)
    if form == "product":
        run = start(
            make_plan(
                folder,
                shards=shards,
                spares=1,
                sync_interval=interval,
                entrypoint="tests.benchmarks.overhead_workload:train",
                params={"counter": str(counter)},
                max_respawns=2,
                checkpoint_every_s=30.0,
            )
        ).run
        group = run.pid
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
        command = [sys.executable, "-m", "tests.benchmarks.overhead_workload", form, str(shards), port]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        # A session of its own, as the product has: the kernel deals processors out to sessions.
        group = subprocess.Popen([*command, str(counter)], env=environment, start_new_session=True).pid
    try:
        yield Form(group, reader)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def middle(values: Sequence[float]) -> tuple[float, list[float]]:
    """Return the median and the interval in which it lies with 95 % confidence (by order statistics)."""
    ordered = sorted(values)
    half = 0.98 * math.sqrt(len(ordered))
    low, high = math.floor(len(ordered) / 2 - half), math.ceil(len(ordered) / 2 + half)
    return statistics.median(ordered), [ordered[max(0, low)], ordered[min(len(ordered), high) - 1]]


def percent(ratios: Sequence[float]) -> tuple[float, list[float]]:
    """Return how much more than 1 the ratios are, in percent, with the interval."""
    median, interval = middle(ratios)
    return round(100 * (median - 1), 2), [round(100 * (each - 1), 2) for each in interval]


def measure(shards: int, rounds: int, interval: int) -> dict[str, Any]:
    """Let the forms take turns and compare."""
    blocks: dict[str, list[Block]] = {form: [] for form in FORMS}
    with ExitStack() as stack:
        scratch = tempfile.TemporaryDirectory(prefix="sync-overhead-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(scratch))
        forms = {}
        for name in FORMS:
            forms[name] = stack.enter_context(running(name, shards, folder, interval))
            forms[name].warm_up()
        for number in range(rounds):
            for name in FORMS if number % 2 else FORMS[::-1]:  # nobody is always the first
                blocks[name].append(forms[name].train_block())
    bare, product, ddp = (blocks[name] for name in FORMS)
    overhead, overhead_95 = percent(
        [ours.wall_s / its.wall_s for ours, its in zip(product, bare, strict=True)]
    )
    cpu, cpu_95 = percent([ours.cpu_s / its.cpu_s for ours, its in zip(product, bare, strict=True)])
    free, free_95 = percent([on_free_cores(*pair, shards) for pair in zip(product, bare, strict=True)])
    speedup, speedup_95 = middle([its.wall_s / ours.wall_s for ours, its in zip(product, ddp, strict=True)])
    step_s = {name: statistics.median(block.wall_s for block in blocks[name]) for name in FORMS}
    return {
        "shards": shards,
        "rounds": rounds,
        "sync_interval": interval,
        "overhead_pct": overhead,
        "overhead_pct_95": overhead_95,
        "cpu_overhead_pct": cpu,
        "cpu_overhead_pct_95": cpu_95,
        "overhead_on_free_cores_pct": free,
        "overhead_on_free_cores_pct_95": free_95,
        f"speedup_k{interval}_over_ddp": round(speedup, 3),
        f"speedup_k{interval}_over_ddp_95": [round(each, 3) for each in speedup_95],
        "step_ms": {name: round(1000 * seconds, 2) for name, seconds in step_s.items()},
        "step_cpu_ms": {name: median_ms([block.cpu_s for block in blocks[name]]) for name in FORMS},
        "beside_pct_of_a_core": round(100 * statistics.median(block.beside for block in product), 2),
        "samples_per_s": {name: round(shards * BATCH / seconds, 1) for name, seconds in step_s.items()},
        "load_average": round(os.getloadavg()[1], 1),
    }


def on_free_cores(ours: Block, its: Block, shards: int) -> float:
    """Return how much longer a step takes where each shard has a core, and the rest shares those."""
    return ours.main_cpu_s / its.main_cpu_s * (1 + (ours.beside - its.beside) / shards)


def median_ms(seconds: Sequence[float]) -> float:
    """Return the median in milliseconds."""
    return round(1000 * statistics.median(seconds), 2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--product-interval", type=int, default=BLOCK)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    show(measure(options.shards, options.rounds, options.product_interval), as_json=options.json)


if __name__ == "__main__":
    main()
