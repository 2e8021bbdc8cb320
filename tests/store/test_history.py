"""What finished runs tell is written with the end of their lease, read back and forgotten."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import Engine

from airflow_gpu_provider.reports import DeviceReport, NodeReport
from airflow_gpu_provider.store.endings import Ending
from airflow_gpu_provider.store.history import FinishedRun, RunStore, finished_run
from airflow_gpu_provider.store.leadership import Term
from airflow_gpu_provider.store.repository import Repository
from airflow_gpu_provider.store.turns import Overtaken, Turn, TurnStore
from airflow_gpu_provider.wire import ReleaseBody, RequestBody

from .conftest import NOW, body, lease_id_of

Give = Callable[..., None]
REQUEST = RequestBody(task_class="dag.task")


def device_of(model: str = "A100", **more: Any) -> Callable[[str], tuple[DeviceReport, NodeReport]]:
    """Know every device as one of this model on node n1; ``V-...`` are V100."""

    def find(device: str) -> tuple[DeviceReport, NodeReport]:
        report = DeviceReport(
            id=device, model="V100" if device.startswith("V") else model, memory_mib=1, tflops=35, **more
        )
        return report, NodeReport(name="n1", host="h1", cpu_cores=1, memory_mib=1, devices=(report,))

    return find


def told(**fields: Any) -> ReleaseBody:
    return ReleaseBody(secret="s", epoch=1, **fields)


def run(members: str = "A1 A2", body: ReleaseBody | None = None, **more: Any) -> FinishedRun | None:
    known = {"request": REQUEST, "device_of": device_of(), "was_changed": False} | more
    body = body or told(work=100, work_s=10)
    return finished_run(body, lease_id="l", members=members.split(), now=NOW, **known)


def stored(lease_id: str, ended_at: datetime = NOW, **changes: Any) -> FinishedRun:
    fields: dict[str, Any] = {
        "lease_id": lease_id,
        "task_class": "a",
        "model": "A100",
        "devices": 2,
        "nodes": ("n1",),
        "work": 10.0,
        "work_s": 5.0,
        "shards": 4,
        "failures": 1,
        "failed_on": ("n1",),
        "ended_at": ended_at,
    }
    return FinishedRun(**{**fields, **changes})


@pytest.fixture
def runs(engine: Engine) -> RunStore:
    return RunStore(engine)


# -- what is kept


def test_speed_is_units_a_second_and_device() -> None:
    found = run()
    assert found is not None and (found.model, found.nodes) == ("A100", ("n1",))
    speed = found.throughput()
    assert speed is not None and (speed.task_class, speed.units_per_s) == ("dag.task", 5.0)


@pytest.mark.parametrize(
    "case",
    [
        {"members": "A1 V1"},
        {"body": told(work=100, work_s=10, outcome="failed")},
        {"request": RequestBody(task_class="dag.task", milli=500)},
        {"device_of": device_of(simulated=True)},
        {"device_of": lambda device: None},
        {"was_changed": True},
        {"body": told()},
    ],
    ids=["models", "failed", "part of a device", "simulated", "gone", "moved", "nothing told"],
)
def test_a_speed_that_compares_to_no_other_is_not_kept(case: dict[str, Any]) -> None:
    assert run(**case) is None


def test_a_failed_training_on_several_models_tells_of_its_shards_all_the_same() -> None:
    body = told(outcome="failed", work=1, work_s=1, shards=4, failures=2, failed_on=("n1",))
    found = run("A1 V1", body)
    assert found is not None and found.throughput() is None
    outcome = found.outcome()
    assert outcome is not None
    assert (outcome.model, outcome.shards, outcome.failures, outcome.failed_on) == (None, 4, 2, ("n1",))


@pytest.mark.parametrize(
    "fields",
    [{"work": 1}, {"work_s": 1}, {"work": 0, "work_s": 1}, {"failures": 1}, {"shards": 1, "failures": 2}],
)
def test_what_does_not_add_up_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        told(**fields)


# -- the tables


def test_a_turn_writes_what_runs_told_and_it_comes_back_whole(
    runs: RunStore, turns: TurnStore, term: Term, repository: Repository, grant: Give
) -> None:
    claim_id = repository.submit(body(), now=NOW, usable=())
    grant(claim_id, "A1")
    written = stored(lease_id_of(claim_id))
    ending = Ending(claim_id, "released", lease_id_of(claim_id), "done")
    turns.write(term, Turn(NOW, endings=[ending], runs=[written]))
    assert runs.newest(9) == runs.since(NOW) == [written]
    with pytest.raises(Overtaken):
        turns.write(term, Turn(NOW, endings=[ending], runs=[written]))


def test_a_replica_that_does_not_lead_writes_it_too_and_once(
    runs: RunStore, repository: Repository, grant: Give
) -> None:
    claim_id = repository.submit(body(), now=NOW, usable=())
    grant(claim_id, "A1")
    for has_ended in (True, False):
        released = told(work=6, work_s=2)
        found = repository.release(lease_id_of(claim_id), released, now=NOW, device_of=device_of())
        assert found is has_ended
    (kept,) = runs.newest(9)
    assert (kept.lease_id, kept.devices, kept.work, kept.work_s) == (lease_id_of(claim_id), 1, 6.0, 2.0)


def test_of_each_class_and_model_the_newest_are_read(runs: RunStore, turns: TurnStore, term: Term) -> None:
    of_a = [stored(f"a{i}", NOW + timedelta(seconds=i)) for i in range(5)]
    of_b = [stored("b", NOW, task_class="b"), stored("none", NOW, task_class=None, model=None)]
    turns.write(term, Turn(NOW, endings=[Ending("x", "cancelled")], runs=[*of_a, *of_b]))
    assert sorted(each.lease_id for each in runs.newest(2)) == ["a3", "a4", "b", "none"]
    assert [each.lease_id for each in runs.since(NOW + timedelta(seconds=3))] == ["a3", "a4"]
    assert runs.forget_before(NOW + timedelta(seconds=4)) == 6
    assert [each.lease_id for each in runs.newest(9)] == ["a4"]
