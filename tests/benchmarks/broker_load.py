"""Leases a second of a served broker, and how long a claim waits for its grant, over real HTTP.

Run ``python -m tests.benchmarks.broker_load --nodes 1000 --clients 8 --requests 200 --json``.

``steady``: each client acquires a free device and releases it, again and again (a lease = both).
``full``: every device is leased and ``--pending`` claims wait; each release is timed until the grant that it
makes possible is seen by the one who waits for it, with one long-poll for all claims as a triggerer does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.benchmarks.served import (
    Connection,
    Replica,
    database,
    database_cpu_s,
    nodes,
    percentiles,
    served,
)


def body(task: str, gpus: int = 1, model: str | None = None) -> dict[str, Any]:
    """Return a claim for the wire."""
    request = {"gpus": gpus, "models": [model] if model else []}
    return {"key": {"dag_id": "bench", "run_id": "r", "task_id": task}, "request": request}


def acquire(connection: Connection, task: str) -> dict[str, Any]:
    """Return a granted lease."""
    view = connection.post("/v1/claims?wait_s=30", body(task))
    if view["lease"] is None:
        raise RuntimeError(f"not granted: {view}")
    lease: dict[str, Any] = view["lease"]
    return lease


def release(connection: Connection, lease: dict[str, Any]) -> None:
    """Give a lease back."""
    path = f"/v1/leases/{lease['lease_id']}/release"
    connection.post(path, {"secret": lease["secret"], "epoch": lease["epoch"]})


def cpu_ms(broker: Replica) -> dict[str, float]:
    """Return the processor time that each part used so far; a database in a file is the broker's."""
    used = {"broker": broker.cpu_s(), "clients": time.process_time()}
    if broker.url.startswith("postgresql"):
        used["database"] = database_cpu_s(broker.url)
    return {who: 1000 * seconds for who, seconds in used.items()}


def steady(broker: Replica, *, clients: int, requests: int) -> dict[str, Any]:
    """Acquire and release with all clients at once."""
    granted: list[float] = []
    released: list[float] = []
    start = threading.Barrier(clients + 1)

    def client(number: int) -> None:
        connection = broker.connect()
        release(connection, acquire(connection, f"warm-{number}"))
        start.wait()
        for index in range(requests):
            begun = time.perf_counter()
            lease = acquire(connection, f"c{number}-{index}")
            held = time.perf_counter()
            release(connection, lease)
            granted.append(held - begun)
            released.append(time.perf_counter() - held)

    with ThreadPoolExecutor(clients) as pool:
        futures = [pool.submit(client, number) for number in range(clients)]
        start.wait()
        cpu, begun = cpu_ms(broker), time.perf_counter()
        for future in futures:
            future.result()
        wall = time.perf_counter() - begun
        used = cpu_ms(broker)
    leases = clients * requests
    return {
        "leases": leases,
        "leases_per_s": round(leases / wall, 1),
        "submit_to_grant_ms": percentiles(granted),
        "release_ms": percentiles(released),
        **{f"{who}_cpu_ms_per_lease": round((used[who] - cpu[who]) / leases, 3) for who in used},
    }


def full(broker: Replica, *, devices: int, requests: int, pending: int) -> dict[str, Any]:
    """Time each release until the waiting claim that gets the device hears of it."""
    connection = broker.connect()
    held = [acquire(connection, f"holder-{index}") for index in range(devices)]
    waiting = [connection.post("/v1/claims", body(f"waiting-{i}"))["claim_id"] for i in range(pending)]
    seen: dict[str, float] = {}
    heard = threading.Condition()
    stop = threading.Event()

    def watch() -> None:
        watcher = broker.connect()
        question: dict[str, Any] = {"claim_ids": waiting}
        while not stop.is_set():
            answer = watcher.post("/v1/claims/wait", {**question, "timeout_s": 2})
            at = time.perf_counter()
            fired = [view["claim_id"] for view in answer["ready"]]
            with heard:
                seen.update(dict.fromkeys(fired, at))
                heard.notify_all()
            question = {"watch": answer["watch"], "drop": fired}

    watcher = threading.Thread(target=watch)
    watcher.start()
    time.sleep(1)
    times: list[float] = []
    for index in itertools.count():
        if index == min(requests, len(held), pending):
            break
        known = len(seen)
        begun = time.perf_counter()
        release(connection, held[index])
        with heard:
            if not heard.wait_for(lambda known=known: len(seen) > known, timeout=30):  # type: ignore[misc]
                raise RuntimeError("a release made no waiting claim start within 30 s")
        times.append(max(seen.values()) - begun)
    stop.set()
    watcher.join(30)
    return {"release_to_next_grant_ms": percentiles(times), "pending": pending, "devices": devices}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--database", choices=("postgresql", "sqlite"), default="postgresql")
    parser.add_argument("--mode", choices=("steady", "full"), default="steady")
    parser.add_argument("--pending", type=int, default=5000)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    args = parser.parse_args()
    # Nobody renews: on a slow machine the leases would end before all claims wait.
    with database(args.database) as url, served(url, lease_ttl_s="3600") as broker:
        agent = broker.connect("agent")
        # Full mode leases every device first; a small fleet fills sooner and its queue is as long.
        count = args.nodes if args.mode == "steady" else min(args.nodes, max(1, args.requests // 8 + 1))
        reports = nodes(count)
        for first in range(0, count, 100):
            agent.post("/v1/agents/report", {"nodes": reports[first : first + 100]})
        if args.mode == "steady":
            result = steady(broker, clients=args.clients, requests=args.requests)
        else:
            result = full(broker, devices=8 * count, requests=args.requests, pending=args.pending)
    result = {"nodes": count, "clients": args.clients, "database": args.database, "mode": args.mode, **result}
    if not args.json:
        print("\n".join(f"{name}: {value}" for name, value in result.items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
