"""Whether a task is over, as a process that is being ended asks the broker."""

from __future__ import annotations

import asyncio

import pytest
from airflow.sdk import Connection

from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.operators.kept_run import is_task_over
from airflow_gpu_provider.server.auth import mint_token
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.wire import ClaimBody, LeaseView, RequestBody, TaskKey
from tests.server.conftest import SECRET


@pytest.fixture
def hook(base_url: str) -> GpuBrokerHook:
    token = mint_token(SECRET, role="task", subject="test", ttl_s=600)
    connection = Connection(conn_id="gpu_default", conn_type="gpu", host=base_url, password=token)
    return GpuBrokerHook("gpu_default", connection=connection)


def lease_of(hook: GpuBrokerHook, try_number: int) -> LeaseView:
    key = TaskKey(dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=try_number)
    view = hook.submit(ClaimBody(key=key, request=RequestBody(gpus=1), outlives_worker=True), wait_s=5)
    assert view.lease is not None
    return view.lease


def test_a_worker_whose_lease_a_later_try_took_over_does_not_end_that_ones_training(
    broker: Broker, hook: GpuBrokerHook
) -> None:
    first = lease_of(hook, 1)
    second = lease_of(hook, 2)
    assert second.lease_id == first.lease_id
    assert not is_task_over(first, hook)
    asyncio.run(broker.cancel(second.claim_id, "revoked"))
    assert is_task_over(second, hook)
