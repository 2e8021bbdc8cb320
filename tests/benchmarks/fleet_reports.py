"""What a big fleet's reports cost the broker: every node reports its devices once a second, over real HTTP.

Run ``python -m tests.benchmarks.fleet_reports --nodes 1000 --json``. Each node sends its own report, as its
agent does, with measurements that change from second to second and, every third time, news of the latency to
eight others: as much as the rounds of a large zone bring. A report is missed when it was not answered with
success within its second. CPU is that of the broker's process alone.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.benchmarks.served import Replica, database, nodes, percentiles, served

_SENDERS = 8


def _measured(report: dict[str, Any], chance: random.Random, second: int, names: list[str]) -> str:
    """Return a report with measurements of this second."""
    others = chance.sample(names, min(8, len(names))) if second == 0 else []
    latency_ms = {name: round(0.1 + chance.random(), 2) for name in others}
    devices = [
        {
            **device,
            "utilisation": round(chance.random(), 2),
            "memory_used_mib": chance.randrange(device["memory_mib"]),
            "temperature_c": 40 + chance.randrange(40),
            "power_w": 50.0 + chance.randrange(300),
        }
        for device in report["devices"]
    ]
    place = {"echo_at": "10.0.0.1:9339", "latency_ms": latency_ms}
    return json.dumps({"nodes": [{**report, **place, "devices": devices}], "peer_plan": "told"})


class Sender:
    """Sends the reports of some nodes, spread over each second."""

    def __init__(self, broker: Replica, reports: list[dict[str, Any]], names: list[str], seed: int) -> None:
        self._connection = broker.connect("agent")
        # Made before the clock runs: the sender's work must not count as the broker's slowness.
        chance = random.Random(seed)
        self._bodies = [[_measured(report, chance, at, names) for report in reports] for at in range(3)]
        self.missed = 0
        self.seconds: list[float] = []

    def run(self, start: float, seconds: int) -> None:
        """Send every node's report once in each second."""
        for second in range(seconds):
            bodies = self._bodies[second % len(self._bodies)]
            for index, body in enumerate(bodies):
                due = start + second + index / len(bodies)
                time.sleep(max(0.0, due - time.perf_counter()))
                begun = time.perf_counter()
                try:
                    self._connection.send("/v1/agents/report", body)
                    ended = time.perf_counter()
                    self.seconds.append(ended - begun)
                    self.missed += ended - due > 1.0
                except (OSError, RuntimeError):
                    self.missed += 1


def measure(*, count: int, seconds: int, kind: str) -> dict[str, Any]:
    """Report for some seconds after every node was seen once."""
    with database(kind) as url, served(url, stale_after_s="10") as broker:
        reports = nodes(count)
        names = [report["name"] for report in reports]
        senders = [Sender(broker, reports[n::_SENDERS], names, n) for n in range(_SENDERS)]
        with ThreadPoolExecutor(_SENDERS) as pool:
            warm = time.perf_counter() + 0.1
            list(pool.map(lambda sender: sender.run(warm, 3), senders))
            for sender in senders:
                sender.missed, sender.seconds = 0, []
            cpu, start = broker.cpu_s(), time.perf_counter() + 0.1
            list(pool.map(lambda sender: sender.run(start, seconds), senders))
        wall = time.perf_counter() - start
        used = broker.cpu_s() - cpu
        rows = broker.connect().get("/v1/nodes")
    return {
        "nodes": count,
        "devices": sum(len(row["devices"]) for row in rows),
        "seconds": seconds,
        "broker_cpu_pct": round(100 * used / wall, 1),
        "missed_reports": sum(sender.missed for sender in senders),
        "stale_nodes": sum(row["state"] == "stale" for row in rows),
        "report_ms": percentiles([each for sender in senders for each in sender.seconds]),
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--database", choices=("postgresql", "sqlite"), default="postgresql")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    args = parser.parse_args()
    result = measure(count=args.nodes, seconds=args.seconds, kind=args.database)
    if not args.json:
        print("\n".join(f"{name}: {value}" for name, value in result.items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
