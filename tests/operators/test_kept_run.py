"""A run in the hands of a keeper: whether its task is over, and what is asked of a keeper that has ended."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from airflow.sdk import Connection

from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.inventory.host import local_host
from airflow_gpu_provider.operators.keeper_files import BrokerAddress, Orders, Whereabouts, leave_orders
from airflow_gpu_provider.operators.kept_run import KeptRun, is_passed_on, is_task_over
from airflow_gpu_provider.server.auth import mint_token
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.training.process_identity import started_at
from airflow_gpu_provider.triggers.training import TrainingTrigger
from airflow_gpu_provider.wire import ClaimBody, LeaseView, RequestBody, TaskKey
from tests.server.conftest import SECRET
from tests.training.running import make_plan

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def hook(base_url: str) -> GpuBrokerHook:
    token = mint_token(SECRET, role="task", subject="test", ttl_s=600)
    connection = Connection(conn_id="gpu_default", conn_type="gpu", host=base_url, password=token)
    return GpuBrokerHook("gpu_default", connection=connection)


def ended_keeper(lease: LeaseView) -> Whereabouts:
    """Return those of a keeper that has ended."""
    key = TaskKey(dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=1)
    names = {"lease_id": lease.lease_id, "claim_id": lease.claim_id}
    return Whereabouts(host="h1", pid=1, started="?", key=key, request=RequestBody(gpus=1), **names)


def lease_of(hook: GpuBrokerHook, try_number: int) -> LeaseView:
    key = TaskKey(dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=try_number)
    view = hook.submit(ClaimBody(key=key, request=RequestBody(gpus=1), outlives_worker=True), wait_s=5)
    assert view.lease is not None
    return view.lease


def test_a_worker_whose_lease_a_later_try_took_over_does_not_end_that_ones_training(
    broker: Broker, hook: GpuBrokerHook, tmp_path: Path
) -> None:
    first = lease_of(hook, 1)
    second = lease_of(hook, 2)
    assert second.lease_id == first.lease_id
    assert not is_task_over(first, hook)
    run = KeptRun(make_plan(tmp_path), ended_keeper(second))
    assert is_passed_on(run, first, hook) and not is_passed_on(run, second, hook)
    gone = GpuBrokerHook(connection=Connection(conn_id="gone", conn_type="gpu", host=NOBODY, password="p"))
    gone.patience_s = 0.1
    assert is_passed_on(run, first, gone) and not is_passed_on(run, second, gone), "its keeper knows"
    asyncio.run(broker.cancel(second.claim_id, "revoked"))
    assert is_task_over(second, hook)


def whereabouts(process: subprocess.Popen[bytes], lease: LeaseView) -> Whereabouts:
    return Whereabouts(
        host=local_host(),
        pid=process.pid,
        started=started_at(process.pid) or "",
        key=TaskKey(dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=1),
        lease_id=lease.lease_id,
        claim_id=lease.claim_id,
        request=RequestBody(gpus=1),
    )


def test_a_keeper_that_ended_while_a_retry_asked_for_devices_is_not_taken_to_hold_them(
    hook: GpuBrokerHook, broker: Broker, tmp_path: Path
) -> None:
    lease = lease_of(hook, 1)
    keeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
    plan = make_plan(tmp_path)
    plan.paths.create()
    run = KeptRun(plan, whereabouts(keeper, lease), keeper)
    assert run.is_alive
    assert not run.go_on(lease, hook)
    assert not plan.paths.keeper_orders.exists(), "they hold the lease's secret"


def test_a_person_who_ends_a_deferred_task_lets_its_training_save_before_its_devices_are_free(
    hook: GpuBrokerHook, broker: Broker
) -> None:
    lease = lease_of(hook, 1)
    keeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    trigger = TrainingTrigger(lease.claim_id, "gpu_default", whereabouts(keeper, lease).identity)
    asyncio.run(trigger.on_kill())
    assert keeper.wait(timeout=30) == -signal.SIGTERM
    assert len(broker.repository.live_leases()) == 1, "the keeper gives it back once all is saved"


def test_a_lease_that_was_left_for_a_keeper_which_had_ended_is_given_back_and_its_secret_removed(
    broker: Broker, hook: GpuBrokerHook, tmp_path: Path
) -> None:
    lease = lease_of(hook, 2)
    plan = make_plan(tmp_path)
    plan.paths.create()
    run = KeptRun(plan, ended_keeper(lease))
    address = BrokerAddress.of(hook.gpu_conn_id, hook.connection())
    leave_orders(plan.paths.keeper_orders, Orders(broker=address, lease=lease))
    run.take_back_orders()
    assert broker.repository.live_leases() == []
    assert list(plan.run_dir.glob("*orders*")) == []
    run.take_back_orders()
