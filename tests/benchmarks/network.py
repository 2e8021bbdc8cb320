"""What the placement of ranks and store, and a longer interval, give on a slow network.

Run ``python -m tests.benchmarks.network --json`` as root. Hosts are network namespaces, and what lies
between them is a cable of the test that carries packets late (`tests.training.namespaces`; the kernel's own
netem is a module that many machines lack): sockets, TCP, gloo and the product's run are real, delays are
given. The host's own interfaces are never touched. Where there can be no namespaces the JSON says why.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from airflow_gpu_provider.training.network_options import NetworkOptions
from airflow_gpu_provider.training.plan import Slot
from airflow_gpu_provider.training.ring import relay_of, ring_order, worst_hop
from tests.benchmarks.output import show
from tests.training.namespaces import INTERFACE, VARIABLE, enter, hosts, why_not
from tests.training.running import Running, make_plan, start

#: Milliseconds one way. The ring 0-2-1-3 has no slow hop, the given one has two; 2 is nearest to all others.
DELAYS = {(0, 1): 20.0, (2, 3): 20.0, (0, 2): 1.0, (1, 2): 1.0, (1, 3): 6.0, (0, 3): 6.0}
HOSTS = 4
ROUNDS = 15
NUMBERS = 64 * 1024
CALM_MS, SLOW_MS, THRESHOLD_MS = 1.0, 50.0, 40.0
PAUSE_S = 0.01
_GIVE_UP_S = 180.0


def matrix() -> list[list[float]]:
    """Return the round trips between hosts."""
    return [
        [0.0 if one == other else 2 * DELAYS[min(one, other), max(one, other)] for other in range(HOSTS)]
        for one in range(HOSTS)
    ]


def on_each(names: Sequence[str], act: Callable[[int], float | None]) -> list[float]:
    """Return what ``act`` returns in a process on each host, those that return something."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def run(host: int) -> None:
        enter(names[host])
        answers.put(act(host))

    processes = [context.Process(target=run, args=(host,)) for host in range(len(names))]
    for process in processes:
        process.start()
    found = [answers.get(timeout=_GIVE_UP_S) for _ in processes]
    for process in processes:
        process.join(10)
        process.kill()
    return [each for each in found if each is not None]


def all_reduce_ms(names: Sequence[str], order: Sequence[int], folder: Path) -> float:
    """Return what an all-reduce takes when the hosts have ranks in this order."""
    meeting = str(folder / "-".join(map(str, order)))

    def measure(host: int) -> float | None:
        rank = order.index(host)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=60)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=f"10.77.0.{host + 1}")]
        group: Any = dist.ProcessGroupGloo(dist.FileStore(meeting, HOSTS), rank, HOSTS, options)
        numbers, times = torch.ones(NUMBERS), []
        for _ in range(ROUNDS):
            began_at = time.perf_counter()
            group.allreduce([numbers], dist.AllreduceOptions()).wait()
            times.append(time.perf_counter() - began_at)
        return 1000 * statistics.median(times[2:]) if rank == 0 else None

    return round(on_each(names, measure)[0], 1)


def store_ms(names: Sequence[str], relay: int) -> float:
    """Return what a word from the store on that host takes, as a mean over the other hosts."""
    is_over = multiprocessing.get_context("fork").Barrier(HOSTS)

    def measure(host: int) -> float | None:
        place = (f"10.77.0.{relay + 1}", 29_777)
        store = dist.TCPStore(
            *place, is_master=host == relay, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        store.set(f"word/{host}", "x")
        times = []
        for _ in range(ROUNDS):
            began_at = time.perf_counter()
            store.get(f"word/{host}")
            times.append(time.perf_counter() - began_at)
        is_over.wait(60)
        return None if host == relay else 1000 * statistics.median(times)

    return round(statistics.fmean(on_each(names, measure)), 1)


def placement(folder: Path) -> dict[str, Any]:
    """Compare the chosen ring and relay with the worst and with the order in which the hosts were given."""
    known = matrix()
    chosen, given = ring_order(known), tuple(range(HOSTS))
    with hosts(HOSTS, DELAYS) as (names, _):
        rings = {
            "chosen": all_reduce_ms(names, chosen, folder),
            "as_given": all_reduce_ms(names, given, folder),
        }
        far = max(range(HOSTS), key=lambda host: sum(known[host]))
        relays = {"chosen": store_ms(names, relay_of(known)), "worst": store_ms(names, far)}
    return {
        "ring_all_reduce_ms": rings,
        "ring_slowest_hop_ms": {"chosen": worst_hop(known, chosen), "as_given": worst_hop(known, given)},
        "relay_word_ms": relays,
    }


def steps_per_s(running: Running, seconds: float) -> float:
    """Return the speed from here on, between two synchronisations that are told."""

    def look() -> tuple[int, float]:
        before = running.until(lambda record: True, "a record").step
        return running.until_step(before + 1).step, time.monotonic()

    (first, began_at), _ = look(), time.sleep(seconds)
    last, ended_at = look()
    return round((last - first) / (ended_at - began_at), 1)


def adaptation(folder: Path, *, adapts: bool) -> dict[str, Any]:
    """Let a run meet a slow network for a while."""
    found: dict[str, Any] = {}
    with hosts(2, {(0, 1): CALM_MS}) as (names, cable):
        options = NetworkOptions(
            latency_threshold_ms=THRESHOLD_MS if adapts else None,
            sync_interval_max=40,
            interfaces=(INTERFACE,),
        )
        plan = make_plan(
            folder,
            entrypoint="tests.training.namespaced:train",
            member_slots=tuple(Slot(environment={VARIABLE: name}) for name in names),
            sync_interval=10,
            params={"steps": 100_000, "pause_s": PAUSE_S},
            checkpoint_every_s=3600.0,
            network=options,
        )
        running = start(plan)
        try:
            running.until_step(20)
            found["steps_per_s_calm"] = steps_per_s(running, 4.0)
            cable.delays = {(0, 1): SLOW_MS}
            if adapts:
                changed_at = time.monotonic()
                slow = running.until(lambda record: bool(record.network.sync_schedule), "a longer interval")
                found["longer_after_s"] = round(time.monotonic() - changed_at, 1)
                found["interval"] = slow.network.sync_schedule[-1][1]
            found["steps_per_s_slow"] = steps_per_s(running, 6.0)
            cable.delays = {(0, 1): CALM_MS}
            if adapts:
                changed_at = time.monotonic()
                running.until(
                    lambda record: record.network.sync_schedule[-1][1] == 10, "the interval as before"
                )
                found["as_before_after_s"] = round(time.monotonic() - changed_at, 1)
        finally:
            running.run.kill()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        show({"measured": False, "why_not": reason}, as_json=options.json)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="network-", ignore_cleanup_errors=True) as scratch:
        result = placement(Path(scratch))
        result["interval"] = {
            "delay_ms": {"calm": CALM_MS, "slow": SLOW_MS},
            "fixed": adaptation(Path(scratch, "fixed"), adapts=False),
            "adapting": adaptation(Path(scratch, "adapting"), adapts=True),
        }
    show({"measured": True, **result}, as_json=options.json)


if __name__ == "__main__":
    main()
