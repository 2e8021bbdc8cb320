"""What happens to the work when its lease is lost: real processes, a served broker."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from sqlalchemy import select

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.operators.lease_time import renewal_pause_s
from airflow_gpu_provider.server.auth import mint_token
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.store.tables import lease
from tests.server.conftest import SECRET
from tests.stored_rows import counts

HOLDER = """
import sys, time
from airflow_gpu_provider.exceptions import LeaseLost
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.operators.held_lease import HeldLease
from airflow_gpu_provider.wire import ClaimBody, RequestBody, TaskKey

hook = GpuBrokerHook(patience_s=0.3)
key = TaskKey(dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=1)
view = hook.submit(ClaimBody(key=key, request=RequestBody(gpus=1)), wait_s=5)
lease = HeldLease(view.lease, hook, grace_s=1.0)
try:
    with lease.working():
        print("WORKING", lease.lease_id, flush=True)
        if sys.argv[1] == "stuck":
            time.sleep(60)  # like a CUDA call that does not return: no Python runs
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.01)
except LeaseLost as error:
    print("LOST", time.time(), error, flush=True)
    sys.exit(3)
print("DONE", flush=True)
"""


@pytest.fixture
def quick(broker: Broker, request: pytest.FixtureRequest) -> Broker:
    """Return the broker with a TTL that ends leases in seconds."""
    ttl_s = getattr(request, "param", 1.5)
    broker.settings = broker.desk.settings = broker.settings.model_copy(update={"lease_ttl_s": ttl_s})
    return broker


@pytest.fixture
def environment(quick: Broker, base_url: str) -> dict[str, str]:
    token = mint_token(SECRET, role="task", subject="test", ttl_s=600)
    connection = {"conn_type": "gpu", "host": base_url, "password": token}
    return {**os.environ, "AIRFLOW_CONN_GPU_DEFAULT": json.dumps(connection)}


def start(environment: dict[str, str], kind: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, kind], env=environment, stdout=subprocess.PIPE, text=True
    )


def working(process: subprocess.Popen[str]) -> str:
    """Wait until the process works; return its lease."""
    assert process.stdout is not None
    line = process.stdout.readline().split()
    assert line and line[0] == "WORKING", line
    return line[1]


@pytest.fixture
def holder(environment: dict[str, str], request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    process = start(environment, getattr(request, "param", "busy"))
    yield process
    process.kill()
    process.wait()


def claim_of(broker: Broker, lease_id: str) -> str:
    ((held, claim),) = broker.repository.live_leases()
    assert held.row.id == lease_id
    return str(claim.id)


def test_a_renewed_lease_lives_longer_than_its_ttl(quick: Broker, holder: subprocess.Popen[str]) -> None:
    lease_id = working(holder)
    time.sleep(4)
    assert holder.poll() is None
    assert claim_of(quick, lease_id)


def test_work_whose_lease_is_taken_back_ends_with_the_reason(
    quick: Broker, holder: subprocess.Popen[str]
) -> None:
    asyncio.run(quick.cancel(claim_of(quick, working(holder)), "revoked"))
    output, _ = holder.communicate(timeout=20)
    assert holder.returncode == 3
    assert "LOST" in output and "revoked" in output


@pytest.mark.parametrize("holder", ["stuck"], indirect=True)
def test_work_that_does_not_react_is_killed(quick: Broker, holder: subprocess.Popen[str]) -> None:
    asyncio.run(quick.cancel(claim_of(quick, working(holder))))
    holder.wait(timeout=20)
    assert holder.returncode == -signal.SIGKILL


def test_a_killed_holder_loses_its_devices_after_the_ttl(
    quick: Broker, holder: subprocess.Popen[str]
) -> None:
    working(holder)
    holder.kill()
    deadline = time.monotonic() + 20
    while counts(quick.repository)[1] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert counts(quick.repository) == (0, 0, 0)


@pytest.mark.parametrize("quick", [6.0], indirect=True)
def test_a_broker_that_does_not_answer_ends_the_work_before_the_lease_ends(
    quick: Broker, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    working(holder)

    async def hang(*_args: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(Broker, "renew", hang)
    output, _ = holder.communicate(timeout=30)
    assert holder.returncode == 3
    assert "The work ended because its lease was lost" in output and "could not be renewed" in output
    with quick.engine.connect() as connection:
        expires_at = connection.scalar(select(lease.c.expires_at))
    assert expires_at is not None
    lost_at = float(re.findall(r"LOST (\S+)", output)[0])
    assert lost_at <= expires_at.timestamp(), "the devices may be another's from then on"


def test_an_orphan_of_a_killed_worker_does_not_work_on(
    quick: Broker, environment: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    # A parent like Airflow's worker: it starts the task's process and is then killed itself.
    parent_code = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, {str(script)!r}, 'busy'])\n"
        "print('CHILD', child.pid, flush=True)\n"
        "child.wait()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline().split()[1]))
    working(parent)
    parent.kill()
    parent.wait()
    gone, alive = psutil.wait_procs([child], timeout=10)
    assert (len(gone), alive) == (1, [])


def test_work_lives_through_a_restart_of_the_only_broker() -> None:
    outage_s, reaction_s = 37.0, 10.0
    ttl_s = Settings().lease_ttl_s
    pause_s = renewal_pause_s(ttl_s)
    assert pause_s <= 10, "what a holder is told reaches it soon"
    # The broker goes just before a renewal, and the try after it is back comes a quarter of a pause late.
    assert pause_s + outage_s + pause_s / 4 <= ttl_s - reaction_s
