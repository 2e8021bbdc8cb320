"""A lease is kept while its run is prepared: the served broker, with a lease of a second and a half."""

from __future__ import annotations

import asyncio
import time

import pytest
from airflow.sdk import Connection

from airflow_gpu_provider.exceptions import LeaseLost
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.operators.renewed_meanwhile import renewed_meanwhile
from airflow_gpu_provider.server.auth import mint_token
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.wire import ClaimBody, LeaseView, RequestBody, TaskKey
from tests.server.conftest import SECRET

TTL_S = 1.5


@pytest.fixture
def hook(broker: Broker, base_url: str) -> GpuBrokerHook:
    broker.settings = broker.desk.settings = broker.settings.model_copy(update={"lease_ttl_s": TTL_S})
    token = mint_token(SECRET, role="task", subject="test", ttl_s=600)
    connection = Connection(conn_id="gpu_default", conn_type="gpu", host=base_url, password=token)
    return GpuBrokerHook("gpu_default", connection=connection)


@pytest.fixture
def lease(hook: GpuBrokerHook) -> LeaseView:
    key = TaskKey(dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=1)
    view = hook.submit(ClaimBody(key=key, request=RequestBody(gpus=1)), wait_s=5)
    assert view.lease is not None
    return view.lease


def test_a_preparation_that_takes_longer_than_the_lease_lives_does_not_cost_it(
    broker: Broker, hook: GpuBrokerHook, lease: LeaseView
) -> None:
    with renewed_meanwhile(lease, hook):
        time.sleep(2 * TTL_S)
    ((held, _),) = broker.repository.live_leases()
    assert held.row.id == lease.lease_id


def test_a_lease_that_was_taken_back_during_the_preparation_is_told_at_its_end(
    broker: Broker, hook: GpuBrokerHook, lease: LeaseView
) -> None:
    with pytest.raises(LeaseLost, match="revoked"), renewed_meanwhile(lease, hook):
        asyncio.run(broker.cancel(lease.claim_id, "revoked"))
        time.sleep(TTL_S)
