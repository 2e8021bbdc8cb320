"""How long nobody is served when the leader dies: three replicas on PostgreSQL, with the default settings.

Run ``python -m tests.benchmarks.takeover --json``.

A leader is killed (SIGKILL), frozen (SIGSTOP) or stopped (SIGTERM). From that moment clients ask the other
replicas for a free device; the time until the first of them holds one is the whole outage as a task sees it:
until the lead is free, another replica has it, has read the tables, and has granted and answered.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.store.db_manager import migrate
from tests.benchmarks.broker_load import body, release
from tests.benchmarks.served import Connection, Replica, database, nodes

_REPLICAS = 3
_DEVICES = 8
_LONGEST_S = 60.0


def leader_of(replicas: list[Replica]) -> Replica:
    """Return the replica that leads."""
    deadline = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline:
        for replica in replicas:
            with contextlib.suppress(OSError, RuntimeError):
                leader = replica.connect().get("/v1/status")["leader"]
                found = [each for each in replicas if leader and int(leader.split(":")[1]) == each.pid]
                if found:
                    return found[0]
        time.sleep(0.05)
    raise RuntimeError("nobody leads")


def until_settled(replicas: list[Replica]) -> None:
    """Wait until all replicas answer and know the fleet."""
    for replica in replicas:
        replica.until_it_answers()
        deadline = time.monotonic() + _LONGEST_S
        while replica.connect().get("/v1/status")["devices"] != _DEVICES:
            if time.monotonic() > deadline:
                raise RuntimeError("a replica does not know the fleet")
            time.sleep(0.1)


def outage_s(end: Callable[[], None], others: list[Replica], name: str) -> float:
    """End a leader; return the seconds until the first client of the others holds a device."""
    granted: queue.Queue[float] = queue.Queue()
    connections = [each.connect() for each in others]
    started = threading.Barrier(len(others) + 1)

    def client(connection: Connection, number: int) -> None:
        started.wait()
        claim = body(f"{name}-{number}")
        while True:
            try:
                view = connection.post("/v1/claims?wait_s=10", claim)
            except RuntimeError:  # HTTP 503: ask again
                time.sleep(0.01)
                continue
            if view["lease"] is not None:
                granted.put(time.perf_counter())
                release(connection, view["lease"])
                return

    threads = [
        threading.Thread(target=client, args=(each, number)) for number, each in enumerate(connections)
    ]
    for thread in threads:
        thread.start()
    begun = time.perf_counter()
    end()
    started.wait()
    first = granted.get(timeout=_LONGEST_S)
    for thread in threads:
        thread.join(_LONGEST_S)
    return first - begun


def outages(replicas: list[Replica], kind: str, times: int) -> Iterator[float]:
    """End leader after leader in one way, and bring each back."""
    for number in range(times):
        until_settled(replicas)
        leader = leader_of(replicas)
        others = [each for each in replicas if each is not leader]
        if kind == "killed":
            yield outage_s(leader.kill, others, f"{kind}-{number}")
            leader.start()
        elif kind == "frozen":
            yield outage_s(lambda: leader.signal(signal.SIGSTOP), others, f"{kind}-{number}")  # noqa: B023
            leader.signal(signal.SIGCONT)
        else:
            yield outage_s(lambda: leader.signal(signal.SIGTERM), others, f"{kind}-{number}")  # noqa: B023
            leader.wait()
            leader.start()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=5, help="leaders ended in each way")
    parser.add_argument("--ttl", type=float, default=None, help="[gpu] leader_ttl_s (default: the default)")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args(arguments)
    more = {} if options.ttl is None else {"leader_ttl_s": str(options.ttl)}
    found: dict[str, Any] = {"leader_ttl_s": options.ttl or Settings().leader_ttl_s}
    with database("postgresql") as url, ExitStack() as stack:
        migrate(url)
        replicas = [Replica(url, **more) for _ in range(_REPLICAS)]
        for replica in replicas:
            stack.callback(replica.end)
        replicas[0].until_it_answers()
        report = {"nodes": nodes(1, gpus=_DEVICES)}
        replicas[0].connect("agent").post("/v1/agents/report", report)
        for kind in ("killed", "frozen", "stopped"):
            seconds = sorted(outages(replicas, kind, options.times))
            found[f"{kind}_s"] = {
                "p50": round(seconds[len(seconds) // 2], 2),
                "max": round(seconds[-1], 2),
                "all": [round(each, 2) for each in seconds],
            }
            if not options.json:
                print(kind, found[f"{kind}_s"], file=sys.stderr)
        found["load_average"] = round(os.getloadavg()[0], 1)
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
