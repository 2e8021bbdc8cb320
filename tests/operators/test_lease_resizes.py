"""The work on a lease asks for more, less, or other devices: a real lease of a served broker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from airflow_gpu_provider.exceptions import InvalidRequest, LeaseLost, NotResized
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.operators.held_lease import HeldLease
from airflow_gpu_provider.operators.offered_move import OfferedMove
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.wire import ClaimBody, RequestBody, TaskKey
from tests.server.conftest import report

SEES = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"


@pytest.fixture
def lease(broker: Broker, hook: GpuBrokerHook) -> Iterator[HeldLease]:
    """Yield a lease of one device of 40 GiB at work; three more are free, two of them of 80 GiB."""
    key = TaskKey(dag_id="d", run_id="r", task_id="t")
    view = hook.submit(ClaimBody(key=key, request=RequestBody(gpus=1)), wait_s=5)
    assert view.lease is not None
    broker.report(ReportBody(nodes=(report("n2", memory_mib=81_920),)))
    with HeldLease(view.lease, hook).working() as lease:
        yield lease


def ids(lease: HeldLease) -> list[str]:
    return [device.id for device in lease.devices]


def visible() -> list[str]:
    """Return what a process that is started now would see."""
    seen = subprocess.run([sys.executable, "-c", SEES], capture_output=True, text=True, check=True)
    return seen.stdout.strip().split(",")


def offered(lease: HeldLease) -> OfferedMove:
    offer = lease.resize(memory="64GiB")
    assert offer is not None
    return offer


def test_memory_that_its_device_has_is_given_at_once(lease: HeldLease, hook: GpuBrokerHook) -> None:
    before = ids(lease)
    assert lease.resize(memory="40GiB") is None
    assert ids(lease) == before
    assert hook.leases()[0].request.memory_mib == 40 * 1024


def test_a_move_is_committed_when_its_block_ends(lease: HeldLease, hook: GpuBrokerHook) -> None:
    (old,) = ids(lease)
    with offered(lease) as move:
        ((before, after),) = move.moves
        assert (before, ids(lease), visible()) == (old, [old], [old]), "until the commit it is the old place"
        assert move.environment()["CUDA_VISIBLE_DEVICES"] == after
        assert "accepted" in str(hook.leases()[0].move)
    assert (ids(lease), visible()) == ([after], [after])
    assert lease.devices[0].memory_mib == 81_920
    assert hook.leases()[0].devices == [after]


def test_a_block_that_raises_stays_where_it_was(lease: HeldLease, hook: GpuBrokerHook) -> None:
    before = ids(lease)
    with pytest.raises(OSError, match="disk full"), offered(lease):
        raise OSError("disk full")
    assert ids(lease) == before == visible()
    assert hook.leases()[0].move is None
    assert hook.status().free == 3


def test_a_move_may_be_answered_step_by_step_and_the_same_wish_gives_the_same_offer(
    lease: HeldLease, hook: GpuBrokerHook
) -> None:
    offer = offered(lease)
    assert offered(lease).moves == offer.moves
    first = offer.expires_at
    offer.accept()
    assert offer.expires_at > first
    offer.commit()
    offer.commit()  # as if the first answer was lost
    assert ids(lease) == [offer.devices[0].id]
    offered_again = lease.resize(memory="64GiB")
    assert offered_again is None, "it has that now"


def test_a_move_that_was_declined_cannot_be_committed(lease: HeldLease) -> None:
    offer, before = offered(lease), ids(lease)
    offer.decline()
    with pytest.raises(NotResized, match="old devices are still held"):
        offer.commit()
    assert ids(lease) == before


def test_devices_join_and_are_given_back(lease: HeldLease, hook: GpuBrokerHook) -> None:
    (first,) = ids(lease)
    joined = lease.grow(3)
    assert len(joined) == 2 and ids(lease) == [first, *(device.id for device in joined)]
    assert visible() == ids(lease)
    assert lease.grow(3) == ()
    lease.give_back([first, joined[0]])
    assert ids(lease) == [joined[1].id] == visible()
    lease.give_back([first, joined[0]])  # as if the first answer was lost
    assert hook.status().free == 3


def test_what_cannot_be_leaves_the_lease_and_says_what_would_help(lease: HeldLease) -> None:
    before = ids(lease)
    with pytest.raises(NotResized, match="asked 9 members, has 1"):
        lease.grow(9)
    with pytest.raises(NotResized, match="largest has 40GiB"):
        lease.resize(memory="100GiB")
    with pytest.raises(InvalidRequest, match="no size of memory"):
        lease.resize(memory="lots")
    with pytest.raises(InvalidRequest, match="give_back"):
        lease.grow(0)
    with pytest.raises(InvalidRequest, match="return from the task"):
        lease.give_back(before)
    assert ids(lease) == before


def test_a_lease_that_ended_cannot_be_resized(broker: Broker, lease: HeldLease, hook: GpuBrokerHook) -> None:
    hook.cancel(lease.claim_id)
    with pytest.raises(LeaseLost, match="has ended"):
        lease.resize(memory="64GiB")


def test_the_environment_of_before_comes_back_after_the_work(broker: Broker, hook: GpuBrokerHook) -> None:
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    key = TaskKey(dag_id="d", run_id="r", task_id="u")
    view = hook.submit(ClaimBody(key=key, request=RequestBody(gpus=1)), wait_s=5)
    assert view.lease is not None
    with HeldLease(view.lease, hook).working() as lease:
        lease.grow(2)
        assert os.environ["CUDA_VISIBLE_DEVICES"].count("GPU-") == 2
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


def test_a_share_grows_to_the_whole_device_and_its_processes_hear_of_it(
    broker: Broker, hook: GpuBrokerHook
) -> None:
    key = TaskKey(dag_id="d", run_id="r", task_id="share")
    asked = RequestBody(gpus=1, memory_mib=8192, milli=200)
    view = hook.submit(ClaimBody(key=key, request=asked), wait_s=5)
    assert view.lease is not None
    with HeldLease(view.lease, hook).working() as lease:
        assert (lease.memory_limit_mib, os.environ["GPU_MEMORY_LIMIT_MIB"]) == (8192, "8192")
        assert lease.resize(memory="16GiB") is None
        assert (lease.memory_limit_mib, os.environ["GPU_MEMORY_LIMIT_MIB"]) == (16_384, "16384")
        with pytest.raises(InvalidRequest, match="made of whole devices"):
            lease.grow(2)
        assert lease.resize(memory="40GiB") is None
        assert lease.memory_limit_mib is None
        assert "GPU_MEMORY_LIMIT_MIB" not in os.environ
    assert "GPU_MEMORY_LIMIT_MIB" not in os.environ
