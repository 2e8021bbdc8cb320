"""Three replicas on PostgreSQL, twenty clients, and replicas that are killed or paused at random.

Whatever happens to the replicas: no device is ever in two hands, nothing that was promised is lost, and in
the end tables and history agree.
"""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine, func, select

from airflow_gpu_provider.store.tables import claim, lease, lease_device
from airflow_gpu_provider.wire import API_PREFIX
from tests.benchmarks.served import Replica, nodes, token

_CLIENTS = 20
_REPLICAS = 3
_DEVICES = 8


@dataclass
class History:
    """What the clients saw: from when to when each held which device."""

    held: list[tuple[str, float, float, str]] = field(default_factory=list)  #: device, from, to, lease
    granted: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Client:
    """Acquires, holds and releases, asking whichever replica answers."""

    def __init__(self, ports: list[int], history: History, seed: int) -> None:
        self._ports = ports
        self._history = history
        self._random = random.Random(seed)
        headers = {"Authorization": f"Bearer {token('task')}"}
        self._http = httpx.Client(headers=headers, timeout=3.0, trust_env=False)

    def work_until(self, deadline: float) -> None:
        """Lease devices until the time is over; then give back what is held."""
        while time.monotonic() < deadline:
            self._one_lease()

    def _one_lease(self) -> None:
        key = {"dag_id": "crash", "run_id": "r", "task_id": uuid.uuid4().hex}
        body = {"key": key, "request": {"gpus": self._random.choice((1, 1, 2))}}
        view = self._ask("/v1/claims?wait_s=1", body)
        while view["lease"] is None:
            assert view["state"] in ("pending", "granted"), view
            view = self._ask(f"/v1/claims/{view['claim_id']}/collect", {})
            time.sleep(0.05)
        held = view["lease"]
        since = time.monotonic()
        with self._history.lock:
            self._history.granted.add(held["lease_id"])
        time.sleep(self._random.uniform(0.0, 0.4))
        mine = {"secret": held["secret"], "epoch": held["epoch"]}
        until = time.monotonic()
        answer = self._ask(f"/v1/leases/{held['lease_id']}/release", mine)
        with self._history.lock:
            devices = [device["id"] for device in held["devices"]]
            self._history.held += [(device, since, until, held["lease_id"]) for device in devices]
            if "released" in answer:
                self._history.released.add(held["lease_id"])
            else:
                self._history.lost.append(f"{held['lease_id']}: {answer}")

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Repeat a call at one replica after another until one answers it."""
        while True:
            port = self._random.choice(self._ports)
            try:
                answer = self._http.post(f"http://127.0.0.1:{port}{API_PREFIX}{path}", json=body)
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            if answer.status_code < 500:
                found: dict[str, Any] = answer.json()
                return found
            time.sleep(0.05)


@pytest.fixture
def replicas(migrated_postgres_url: str) -> Iterator[list[Replica]]:
    url = migrated_postgres_url.replace("postgresql://", "postgresql+psycopg2://")
    with ExitStack() as stack:
        started = [Replica(url) for _ in range(_REPLICAS)]
        for replica in started:
            stack.callback(replica.end)
        for replica in started:
            replica.until_it_answers()
        agent = started[0].connect("agent")
        agent.post("/v1/agents/report", {"nodes": nodes(1, gpus=_DEVICES)})
        for replica in started:  # reports reach the other replicas within a second or two
            deadline = time.monotonic() + 30
            while replica.connect().get("/v1/status")["devices"] != _DEVICES:
                assert time.monotonic() < deadline, "a replica does not know the fleet"
                time.sleep(0.1)
        yield started


def torment(replicas: list[Replica], deadline: float, seed: int) -> list[str]:
    """Kill, pause and restart replicas at random; return what was done."""
    chance, done = random.Random(seed), []
    while time.monotonic() < deadline:
        time.sleep(chance.uniform(0.5, 2.0))
        replica = chance.choice(replicas)
        if chance.random() < 0.5:
            replica.kill()
            replica.start()
            done.append("killed")
        else:
            replica.signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0.5, 4.0))
            replica.signal(signal.SIGCONT)
            done.append("paused")
    for replica in replicas:
        replica.until_it_answers()
    return done


def overlaps(history: History) -> list[str]:
    """Return where two leases had the same device at the same time."""
    found = []
    by_device: dict[str, list[tuple[float, float, str]]] = {}
    for device, since, until, lease_id in history.held:
        by_device.setdefault(device, []).append((since, until, lease_id))
    for device, spans in by_device.items():
        spans.sort()
        for (_, until, first), (since, _, second) in itertools.pairwise(spans):
            if since < until and first != second:
                found.append(f"{device}: {first} until {until:.3f}, {second} since {since:.3f}")
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seconds", [pytest.param(15, id="15 s"), pytest.param(60, id="60 s", marks=pytest.mark.slow)]
)
def test_nothing_is_lost_or_doubled_when_replicas_die(
    replicas: list[Replica], migrated_postgres_url: str, seconds: int
) -> None:
    history = History()
    ports = [replica.port for replica in replicas]
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(_CLIENTS + 1) as pool:
        clients = [pool.submit(Client(ports, history, seed).work_until, deadline) for seed in range(_CLIENTS)]
        done = pool.submit(torment, replicas, deadline, seed=seconds).result()
        for each in clients:
            each.result()

    assert {"killed", "paused"} <= set(done), done
    assert len(history.granted) > _CLIENTS, "work went on"
    assert overlaps(history) == []
    assert history.lost == [], "a TTL of 60 s outlives every pause here"
    assert history.released == history.granted

    engine = create_engine(migrated_postgres_url)
    with engine.connect() as connection:
        states = dict(
            connection.execute(
                select(claim.c.state, func.count()).where(claim.c.dag_id == "crash").group_by(claim.c.state)
            ).all()
        )
        reasons = dict(connection.execute(select(lease.c.id, lease.c.end_reason)).all())
        live = connection.scalar(select(func.count()).where(lease_device.c.ended_at.is_(None)))
    engine.dispose()
    assert states == {"ended": len(history.granted)}, "one lease for each claim, and no claim left"
    assert reasons == dict.fromkeys(history.granted, "released")
    assert live == 0
    print(f"{len(history.granted)} leases while replicas were {done}")
