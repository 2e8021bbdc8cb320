"""The same failure here and under others: one of two shards is killed while a spare waits.

Run ``python -m tests.benchmarks.peers --json``. torchrun gets what it needs to recover at all and fast:
agents in reserve, a store outside of them, short keep-alives; state comes back from a file that is saved at
every synchronisation. torchft is left out where it is not installed. Each try is given up after a while and
then counts as not recovered (null).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scripts.processes import Process, descendants, send
from tests.benchmarks.output import show
from tests.benchmarks.recovery import PAUSE_S, Shape, single

SHARDS = 2
SYNC_INTERVAL = 10
GIVE_UP_S = 90.0
START_S = 120.0
SETTLE_S = 15.0  #: for the spare to import torch and to join
SAME_S = 0.05  #: a synchronisation this soon after the kill was under way before it
#: keep-alives shorter than 5 s make torchrun take living agents for dead when a spare joins
RENDEZVOUS = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=1"


class Peer:
    """Processes of another system, which write when they have shared a state."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start another process; after the first two it is a spare."""
        raise NotImplementedError

    def fault_to_first_sync_s(self) -> float | None:
        """Kill the second process and what is below it; return the seconds until two share a state again."""
        try:
            for _ in range(SHARDS):
                self.start()
            if len(self._until_syncs(0.0, START_S)) < SHARDS:
                raise SystemExit(f"Training did not start:\n{(self._folder / '0.log').read_text()[-4000:]}")
            self.start()
            time.sleep(SETTLE_S)
            victim = self._processes[1]
            below = descendants(victim.pid)
            at = time.time()
            _kill(victim, below)
            found = self._until_syncs(at + SAME_S, GIVE_UP_S)
            return round(max(found) - at, 3) if len(found) == SHARDS else None
        finally:
            self.end()

    def end(self) -> None:
        """End every process."""
        for process in self._processes:
            _kill(process, descendants(process.pid))
            process.wait()

    def _run(self, arguments: list[str], environment: dict[str, str]) -> None:
        with (self._folder / f"{len(self._processes)}.log").open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", *arguments],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # as ours: the kernel deals processors out to sessions
                )
            )

    def _until_syncs(self, after: float, limit_s: float) -> list[float]:
        """Return when each of two processes first shared a state; fewer when that takes too long."""
        deadline = time.monotonic() + limit_s
        while len(found := self._first_syncs(after)) < SHARDS and time.monotonic() < deadline:
            time.sleep(0.02)
        return found[:SHARDS]

    def _first_syncs(self, after: float) -> list[float]:
        found = []
        for file in self._folder.glob("syncs-*.jsonl"):
            lines = [line for line in file.read_text().splitlines() if line.endswith("}")]
            times = [at for line in lines if (at := json.loads(line)["at"]) > after]
            found += times[:1]
        return sorted(found)


class Torchrun(Peer):
    """Agents with one worker each; those beyond the number of nodes wait in reserve."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )

    def start(self) -> None:
        """Start an agent."""
        arguments = ["torch.distributed.run", f"--nnodes={SHARDS}:{SHARDS}", "--nproc-per-node=1"]
        arguments += ["--max-restarts=100", "--rdzv-backend=c10d", "--rdzv-id=peers"]
        arguments += [f"--rdzv-endpoint=127.0.0.1:{self._store.port}", f"--rdzv-conf={RENDEZVOUS}"]
        arguments += ["-m", "tests.benchmarks.torchrun_workload", str(self._folder)]
        arguments += ["1000000", str(SYNC_INTERVAL), str(PAUSE_S)]
        # Without this the spare waits in vain for the address of a surviving first rank.
        self._run(arguments, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


class Torchft(Peer):
    """Replicas that a lighthouse in this process brings together; the spare computes as well."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from torchft.coordination import LighthouseServer

        self._lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=SHARDS, join_timeout_ms=1000, heartbeat_timeout_ms=1000
        )

    def start(self) -> None:
        """Start a replica."""
        arguments = ["tests.benchmarks.torchft_workload", str(self._folder), str(len(self._processes))]
        arguments += [str(SHARDS), str(SYNC_INTERVAL), str(PAUSE_S)]
        port = self._lighthouse.address().rsplit(":", 1)[1].rstrip("/")
        self._run(arguments, {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"})

    def end(self) -> None:
        """End the replicas and the lighthouse."""
        super().end()
        self._lighthouse.shutdown()


def _kill(process: subprocess.Popen[bytes], below: list[Process]) -> None:
    for each in below:
        send(each, signal.SIGKILL)
    process.kill()


def summary(times: list[float | None]) -> dict[str, Any]:
    """Return the median of what recovered and all of it."""
    recovered = [seconds for seconds in times if seconds is not None]
    return {
        "fault_to_first_sync_s": round(statistics.median(recovered), 3) if recovered else None,
        "all_fault_to_first_sync_s": times,
        "not_recovered": len(times) - len(recovered),
    }


def measure(runs: int) -> dict[str, Any]:
    """Let the peers take turns."""
    times: dict[str, list[float | None]] = {"ours": [], "torchrun": []}
    if has_torchft := importlib.util.find_spec("torchft") is not None:
        times["torchft"] = []
    shape = Shape(shards=SHARDS, spares=1, sync_interval=SYNC_INTERVAL, steps=600)
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        for number in range(runs):
            ours = single(folder / f"ours-{number}", shape, "kill", 1)
            times["ours"].append(ours.fault_to_first_sync_s)
            times["torchrun"].append(Torchrun(folder / f"torchrun-{number}").fault_to_first_sync_s())
            if has_torchft:
                times["torchft"].append(Torchft(folder / f"torchft-{number}").fault_to_first_sync_s())
    return {
        "fault": "kill",
        "shards": SHARDS,
        "spares": 1,
        "sync_interval": SYNC_INTERVAL,
        "runs": runs,
        "give_up_s": GIVE_UP_S,
        "torch": importlib.metadata.version("torch"),
        **{name: summary(of) for name, of in times.items()},
        **({} if has_torchft else {"torchft": "not installed"}),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.runs)
    show(result, as_json=options.json)


if __name__ == "__main__":
    main()
