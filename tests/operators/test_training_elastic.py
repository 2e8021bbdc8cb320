"""A training takes idle devices and gives them back to those who wait: real runs on a served broker."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.operators.growth_answers import GrowthAnswers
from airflow_gpu_provider.operators.kept_lease import KeptLease
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.training.elastic import assign_elastic
from airflow_gpu_provider.training.run_file import RunState
from airflow_gpu_provider.training.shard_range import ShardRange
from airflow_gpu_provider.wire import ClaimBody, ClaimState, ReleaseBody, RequestBody, TaskKey
from tests.server.conftest import report
from tests.training.running import GIVE_UP_S, make_plan, start

RANGE = ShardRange(2, 4)
STEPS = 300


class Elastic:
    """A run on a lease of two devices, which may have four, and others who want devices too."""

    def __init__(self, hook: GpuBrokerHook, lease: KeptLease, folder: Path) -> None:
        self.hook, self.lease = hook, lease
        self.told = folder / "told"
        self.go_on = folder / "go_on"
        slots = assign_elastic(lease.devices, RANGE, spares=1)
        plan = make_plan(
            folder,
            shards=RANGE.most,
            member_slots=slots.members,
            spare_slots=slots.spares,
            least_devices=RANGE.least,
            max_respawns=4,
            params={
                "steps": STEPS,
                "pause_s": 0.15,
                "hurry_file": str(self.go_on),
                "tell_file": str(self.told),
            },
        )
        self.running = start(plan)
        self._answers = GrowthAnswers(lease, plan.run_dir)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + GIVE_UP_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for {what}: {self.running.logs()}"
            assert not self.running.run.has_ended(), f"ended before {what}: {self.running.logs()}"
            self._answers.look()
            time.sleep(0.05)

    def ask(self, task: str, gpus: int) -> str:
        key = TaskKey(dag_id="d", run_id="r", task_id=task)
        return self.hook.submit(ClaimBody(key=key, request=RequestBody(gpus=gpus)), wait_s=0).claim_id

    def is_granted(self, claim_id: str) -> bool:
        view = self.hook.wait(claim_id, timeout_s=0)
        return view is not None and view.state is ClaimState.GRANTED

    def until_step(self, step: int) -> None:
        def is_there() -> bool:
            record = self.running.run.record()
            return record is not None and record.step >= step

        self.until(is_there, f"step {step}")

    def devices(self) -> int:
        """How many devices the shards are on."""
        record = self.running.run.record()
        told = record.growths[-1:] if record is not None else []
        return int(told[0].split(" on ")[1].split()[0]) if told else 0

    def end(self) -> str:
        """Let the run end, and return its weights."""
        self.go_on.touch()
        self.until_ended()
        record = self.running.run.record()
        assert record is not None and record.state is RunState.SUCCEEDED, (record, self.running.logs())
        assert record.checkpoint is not None
        return record.checkpoint.state_sha256

    def until_ended(self) -> None:
        deadline = time.monotonic() + GIVE_UP_S
        while not self.running.run.has_ended():
            assert time.monotonic() < deadline, self.running.logs()
            self._answers.look()
            time.sleep(0.05)


@pytest.fixture(scope="module")
def unmoved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the weights of as many shards that stay where they are."""
    params = {"steps": STEPS, "pause_s": 0}
    record = start(make_plan(tmp_path_factory.mktemp("unmoved"), shards=RANGE.most, params=params)).end()
    assert record.checkpoint is not None
    return record.checkpoint.state_sha256


@pytest.fixture
def elastic(broker: Broker, hook: GpuBrokerHook, tmp_path: Path) -> Iterator[Callable[..., Elastic]]:
    """Return a function that starts the run; two of the four devices are another's first."""
    started: list[Elastic] = []
    leases: list[Any] = []

    def begin() -> tuple[Elastic, Callable[[], None]]:
        nodes = tuple(report(name, simulated=True) for name in ("n1", "n2"))
        broker.report(ReportBody(nodes=nodes))
        views = [
            hook.submit(
                ClaimBody(key=TaskKey(dag_id="d", run_id="r", task_id=task), request=RequestBody(gpus=2)),
                wait_s=5,
            ).lease
            for task in ("train", "other")
        ]
        held, other = views
        assert held is not None and other is not None
        working = KeptLease(held, hook).working()
        leases.append(working)
        run = Elastic(hook, working.__enter__(), tmp_path)
        started.append(run)
        body = ReleaseBody(secret=other.secret, epoch=other.epoch, outcome="done")
        return run, lambda: hook.release(other.lease_id, body)

    yield begin
    for run in started:
        run.running.run.kill()
    for working in leases:
        working.__exit__(None, None, None)


def test_a_run_takes_idle_devices_and_gives_them_back_to_who_waits_and_no_sample_is_lost_or_seen_twice(
    elastic: Callable[..., Any], unmoved: str
) -> None:
    run, let_go = elastic()
    run.until_step(10)
    let_go()
    run.until(lambda: run.devices() == 4, "the idle devices are used")
    assert len(run.lease.devices) == 4 and run.lease.request.gpus == 4
    waiting = run.ask("later", 2)
    asked_at = time.monotonic()
    run.until(lambda: run.is_granted(waiting), "who waits has devices")
    print(f"gave back after {time.monotonic() - asked_at:.1f} s")
    run.until(lambda: (run.devices(), len(run.lease.devices)) == (2, 2), "the run is on two devices")
    assert run.end() == unmoved
    record = run.running.run.record()
    assert record.failures == [] and record.takeovers == []
    seen = Counter(run.told.read_text().split())
    assert seen == {f"{step}/{shard}": 1 for step in range(STEPS) for shard in range(RANGE.most)}


def test_a_shard_that_is_killed_while_it_joins_leaves_the_run_as_it_was_and_the_devices_go_back(
    elastic: Callable[..., Any], unmoved: str
) -> None:
    run, let_go = elastic()
    run.until_step(10)
    let_go()
    known = set(run.running.pids())
    run.until(lambda: set(run.running.pids()) - known, "newcomers start")
    for uid in set(run.running.pids()) - known:
        os.kill(run.running.pids()[uid], signal.SIGKILL)
        break
    run.until(lambda: len(run.lease.devices) == 2, "the new devices go back")
    assert run.devices() == 0, "nothing moved"
    assert run.end() == unmoved
