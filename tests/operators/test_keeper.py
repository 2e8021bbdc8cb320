"""A keeper that cannot say what it knows, or whose lease is lost while it waits for an answer."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_provider.operators import keeper_files
from airflow_gpu_provider.operators.keeper import Keeper
from airflow_gpu_provider.operators.keeper_files import (
    BrokerAddress,
    KeeperEnd,
    Orders,
    Whereabouts,
    leave_orders,
)
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.run_file import write_json
from airflow_gpu_provider.wire import LeaseView, RequestBody, TaskKey
from tests.training.running import ROOT, make_plan

KEY = TaskKey(dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=1)
VIEW: dict[str, Any] = {
    "lease_id": "l",
    "claim_id": "c",
    "secret": "s",
    "ttl_s": 3.0,
    "devices": [],
    "match_degree": 1.0,
    "granted_at": "2026-01-01T00:00:00Z",
    "expires_at": "2026-01-01T00:00:03Z",
}


def whereabouts(**changes: Any) -> Whereabouts:
    here = {"host": "h1", "pid": 1, "started": "1", "key": KEY, "lease_id": "l", "claim_id": "c"}
    return Whereabouts(**{**here, "request": RequestBody(gpus=1), **changes})


def kept_plan(folder: Path) -> RunPlan:
    """Return a plan that lies where its keeper looks for it, with the word of where that keeper is."""
    plan = make_plan(folder)
    plan.paths.create()
    write_json(plan.paths.plan, plan.model_dump_json())
    whereabouts().write(plan.paths.keeper)
    return plan


def test_a_full_disk_ends_no_run_and_what_was_to_be_told_is_told_once_it_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = kept_plan(tmp_path)
    lease: Any = None
    keeper = Keeper(plan.run_dir, lease, 0)

    def full(path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as disk:
        disk.setattr(keeper_files, "write_json", full)
        keeper._note(guard=7, guard_started="3")
    keeper._note(end=KeeperEnd.LOST, why="the lease was lost")
    said = Whereabouts.read(plan.paths.keeper)
    assert said is not None and (said.guard, said.guard_started, said.end) == (7, "3", KeeperEnd.LOST)


BLOCKED = """
import threading
from airflow_gpu_provider.exceptions import LeaseLost
from airflow_gpu_provider.operators.kept_lease import KeptLease
from airflow_gpu_provider.wire import DeviceView, LeaseView

class Broker:
    def answered_within(self, seconds): return self
    for_renewals = answered_within
    def renew(self, lease_id, body): raise LeaseLost("revoked")

class Run:
    killed = threading.Event()
    def kill(self): self.killed.set()

device = DeviceView(id="G", node="n", host="h", model="m", memory_mib=1, tflops=1.0, simulated=True)
view = LeaseView(
    lease_id="l", claim_id="c", epoch=1, secret="s", ttl_s=3.0, devices=[device], match_degree=1.0,
    granted_at="2026-01-01T00:00:00Z", expires_at="2026-01-01T00:00:03Z",
)
lease = KeptLease(view, Broker())
lease.works_for(Run())
try:
    with lease.working():
        Run.killed.wait(30)  # as a call that returns to Python when it is answered, and never before
        lease.raise_if_lost()
except LeaseLost as lost:
    print(lost.message)
"""


def test_a_run_is_killed_with_its_lease_although_the_keeper_waits_for_an_answer() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, f"the keeper killed itself and left the run: {ended.stderr}"
    assert ended.stdout.splitlines()[-1] == "The work ended because its lease was lost: revoked"


def test_orders_that_come_as_the_run_ends_say_in_which_epoch_the_lease_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = kept_plan(tmp_path)
    later = LeaseView(**VIEW, epoch=2)
    address = BrokerAddress(conn_id="c", host="h", schema_=None, port=None, password="p")

    class Lease:
        lease_id, epoch, released_in = "l", 1, 0

        @contextmanager
        def working(self) -> Iterator[None]:
            yield
            self.released_in = self.epoch

        def adopt(self, view: LeaseView, _hook: object) -> None:
            self.epoch = view.epoch

    lease: Any = Lease()
    keeper = Keeper(plan.run_dir, lease, 0)
    orders = Orders(broker=address, lease=later)
    monkeypatch.setattr(keeper, "_train", lambda: leave_orders(plan.paths.keeper_orders, orders))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    keeper.run()
    assert lease.released_in == 2
    assert not plan.paths.keeper_orders.exists()
