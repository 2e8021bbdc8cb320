"""A training needs more memory in the middle: a real run, on a real lease of a served broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.operators.growth_answers import GrowthAnswers
from airflow_gpu_provider.operators.kept_lease import KeptLease
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.training.failures import FailureCause
from airflow_gpu_provider.training.measurements import read_telemetry
from airflow_gpu_provider.training.run_file import RunRecord, RunState
from airflow_gpu_provider.training.slots import assign_slots
from airflow_gpu_provider.wire import ClaimBody, RequestBody, TaskKey
from tests.server.conftest import report
from tests.training.oracle import expected_weights
from tests.training.running import Running, make_plan, start


@dataclass
class Trained:
    """A run that has ended, and its lease as it was then."""

    record: RunRecord
    devices: list[str]
    limit_mib: int | None
    running: Running

    def weights(self) -> str:
        assert self.record.state is RunState.SUCCEEDED, (self.record, self.running.logs())
        assert self.record.checkpoint is not None
        return self.record.checkpoint.state_sha256


@pytest.fixture
def train(broker: Broker, hook: GpuBrokerHook, tmp_path: Path) -> Iterator[Callable[..., Trained]]:
    """Return a function that trains on a lease to the end, answering what the run asks of it."""
    started: list[Running] = []

    def run(request: RequestBody, shards: int, *, idle: ReportBody | None = None, **params: Any) -> Trained:
        key = TaskKey(dag_id="d", run_id="r", task_id="t")
        view = hook.submit(ClaimBody(key=key, request=request), wait_s=5)
        assert view.lease is not None, view
        if idle is not None:
            broker.report(idle)
        with KeptLease(view.lease, hook).working() as lease:
            slots = assign_slots(lease.devices, lease.spares, shard_count=shards, spares=1)
            plan = make_plan(
                tmp_path,
                shards=shards,
                member_slots=slots.members,
                spare_slots=slots.spares,
                grow_at=0.9,
                params={"pause_s": 0.05, **params},
            )
            running = start(plan)
            started.append(running)
            answers = GrowthAnswers(lease, plan.run_dir)
            while not running.run.has_ended():
                answers.look()
                time.sleep(0.05)
            devices = [device.id for device in lease.devices]
            assert devices == hook.leases()[0].devices and hook.leases()[0].move is None
            return Trained(running.end(), devices, lease.memory_limit_mib, running)

    yield run
    for running in started:
        running.run.kill()


def simulated(node: str, memory_mib: int) -> ReportBody:
    return ReportBody(nodes=(report(node, memory_mib=memory_mib, simulated=True),))


def test_a_shard_that_nears_its_memory_moves_to_idle_devices_without_a_step_done_twice(
    broker: Broker, train: Callable[..., Trained]
) -> None:
    broker.report(simulated("n1", 640))
    done = train(
        RequestBody(gpus=2, memory_mib=500), 2, idle=simulated("n2", 2560), take_memory_at=12, take_mib=400
    )
    assert done.weights() == expected_weights(10)
    assert done.devices == ["GPU-n2-0", "GPU-n2-1"]
    assert (done.record.failures, done.record.takeovers) == ([], [])
    (growth,) = done.record.growths
    assert "of the 640 MiB" in growth and "from GPU-n1-0 to GPU-n2-0" in growth
    lines = read_telemetry(done.running.plan.paths.telemetry)
    told = sorted(
        (line["generation"], line["step"], line["kind"])
        for line in lines
        if line["kind"] in ("sync", "joined")
    )
    (joined_at,) = {step for generation, step, kind in told if (generation, kind) == (1, "joined")}
    assert max(step for generation, step, _ in told if generation == 0) == joined_at, "no step is done again"
    assert broker.repository.live_leases() == []


def test_a_share_grows_in_place_and_nothing_is_restarted(
    broker: Broker, train: Callable[..., Trained]
) -> None:
    broker.report(simulated("n1", 4096))
    request = RequestBody(gpus=1, memory_mib=640, milli=125)
    done = train(request, 1, take_memory_at=12, take_mib=400)
    assert done.weights() == expected_weights(10, shard_count=1)
    assert (done.record.generation, done.record.processes_started) == (0, 2)
    assert "in place" in done.record.growths[0] and (done.limit_mib or 0) >= 1280
    assert "may take 12" in done.running.logs(), "the shard was told its new limit"


def test_a_shard_that_ran_out_of_memory_goes_on_where_there_is_more(
    broker: Broker, train: Callable[..., Trained]
) -> None:
    broker.report(simulated("n1", 1024))
    request = RequestBody(gpus=1, memory_mib=600, milli=125)
    done = train(request, 1, idle=simulated("n2", 4096), out_of_memory_at=25, take_mib=1100)
    assert done.weights() == expected_weights(10, shard_count=1)
    assert [failure.cause for failure in done.record.failures] == [FailureCause.OUT_OF_MEMORY]
    assert done.devices[0].startswith("GPU-n2") and (done.limit_mib or 0) >= 1200
    assert done.record.takeovers == ["u2 took rank 0 of u0"], "not the spare, which had as little"


def test_without_more_memory_the_run_ends_as_before_and_says_what_was_asked(
    broker: Broker, train: Callable[..., Trained]
) -> None:
    broker.report(simulated("n1", 700))
    request = RequestBody(gpus=1, memory_mib=600, milli=125)
    done = train(request, 1, out_of_memory_at=25, take_mib=9999)
    assert done.record.state is RunState.FAILED and len(done.record.failures) == 2
    assert "9999 MiB are needed, 600 allowed" in str(done.record.error)
    assert "refused: " in str(done.record.error) and "the largest has 700MiB" in str(done.record.error)
