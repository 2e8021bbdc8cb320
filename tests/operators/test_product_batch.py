"""The batch operator runs a chunk with or without a lease and fails only after all products were tried."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "catalog"))  # the toy stages and builders live there

from airflow.sdk.exceptions import AirflowFailException
from catalog_builders import START, called, make_plan, row, run_stage

from airflow_gpu_provider.catalog.chunks import Chunk
from airflow_gpu_provider.catalog.ledger import Ledger
from airflow_gpu_provider.catalog.plan import Plan
from airflow_gpu_provider.exceptions import BatchIncomplete, InvalidRequest, LeaseLost
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.operators.held_lease import HeldLease
from airflow_gpu_provider.operators.product_batch import ProductBatchOperator
from airflow_gpu_provider.wire import DeviceView, LeaseView

CONTEXT: Any = {}


def operator(chunk: object, stage: str = "prepare", **arguments: Any) -> ProductBatchOperator:
    usual = {"entrypoint": f"toy_stages:{stage}", "chunk": chunk}
    return ProductBatchOperator(task_id=stage, stage=stage, **{**usual, **arguments})


def planned(folder: Path, *does: str) -> tuple[Plan, dict[str, Any]]:
    rows = [row(f"p{number}", does=what, daily_views=9 - number) for number, what in enumerate(does)]
    plan, (chunk,) = make_plan(folder, rows)
    return plan, chunk.as_xcom()


def lease(*, simulated: bool = True) -> HeldLease:
    device = DeviceView(
        id="GPU-1", node="n", host="h", model="A100", memory_mib=1, tflops=35.0, simulated=simulated
    )
    view = LeaseView(
        lease_id="l",
        claim_id="c",
        epoch=1,
        secret="s",
        devices=[device],
        match_degree=1.0,
        granted_at=START,
        expires_at=START + timedelta(seconds=30),
        ttl_s=30,
    )
    return HeldLease(view, GpuBrokerHook("gpu_default"))


def test_a_stage_without_gpus_asks_for_no_lease_and_sees_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    _, chunk = planned(tmp_path, "", "unusable")
    seen = tmp_path / "in" / "cuda.txt"
    assert operator(chunk, gpus="0").execute(CONTEXT) == {
        "done": 1,
        "reused": 0,
        "unusable": 1,
        "skipped": 0,
        "failed": 0,
    }
    operator(chunk, entrypoint="toy_stages:visible_gpus").execute(CONTEXT)
    assert seen.read_text() == "''"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_leased_stage_gets_the_device_and_the_ledger_names_it(tmp_path: Path) -> None:
    plan, chunk = planned(tmp_path, "")
    run_stage(plan, "prepare")
    operator(chunk, "fit", gpus=1, stage_params={"steps": 7}).run_leased(CONTEXT, lease())
    outcome = Ledger(plan.folders).read("fit", "p0")
    assert outcome is not None
    assert (outcome.device, outcome.device_model) == ("GPU-1", "A100 (simulated)")
    assert (plan.folders.work("p0", "20261101T080000Z") / "fitted.txt").read_text() == "The p0 at 7"


def test_a_lost_lease_stops_before_the_first_product(tmp_path: Path) -> None:
    plan, chunk = planned(tmp_path, "")
    run_stage(plan, "prepare")
    held = lease()
    held._why_lost = LeaseLost("taken back")
    with pytest.raises(LeaseLost):
        operator(chunk, "fit", gpus=1).run_leased(CONTEXT, held)
    assert called(tmp_path, "fit") == []


def test_no_device_is_asked_for_when_nothing_is_left_to_do(tmp_path: Path) -> None:
    # There is no broker here: asking would fail.
    plan, chunk = planned(tmp_path, "", "unusable")
    assert operator(chunk, "fit", gpus=1).execute(CONTEXT)["skipped"] == 2
    run_stage(plan, "prepare")
    run_stage(plan, "fit", steps=10)
    again = operator(chunk, "fit", gpus=1, stage_params={"steps": 10}).execute(CONTEXT)
    assert (again["reused"], again["skipped"]) == (1, 1)


def test_the_task_fails_only_after_all_products_were_tried(tmp_path: Path) -> None:
    plan, chunk = planned(tmp_path, "raise", "", "")
    run_stage(plan, "prepare")
    with pytest.raises(BatchIncomplete, match=r"fit: 1 of 3 products failed .* p0: ValueError: no geometry"):
        operator(chunk, "fit", gpus=1).run_leased(CONTEXT, lease())
    assert called(tmp_path, "fit") == ["p0", "p1", "p2"]


def test_failures_within_the_allowed_share_do_not_fail_the_task(tmp_path: Path) -> None:
    plan, chunk = planned(tmp_path, "raise", "")
    run_stage(plan, "prepare")
    report = operator(chunk, "fit", gpus=1, max_failed_ratio=0.5).run_leased(CONTEXT, lease())
    assert (report["failed"], report["done"]) == (1, 1)


def test_a_leased_chunk_tells_how_many_products_it_made(tmp_path: Path) -> None:
    plan, chunk = planned(tmp_path, "", "", "")
    run_stage(plan, "prepare")
    held = lease()
    operator(chunk, "fit", gpus=1).run_leased(CONTEXT, held)
    told = held.told()
    assert told["work"] == 3 and told["work_s"] > 0
    again = lease()
    operator(chunk, "fit", gpus=1).run_leased(CONTEXT, again)
    assert again.told() == {}, "nothing was left to do"


def test_when_every_failure_is_hopeless_no_retry_is_made(tmp_path: Path) -> None:
    plan, chunk = planned(tmp_path, "raise")
    run_stage(plan, "prepare")
    fit = operator(chunk, "fit", gpus=1, max_attempts=2)
    with pytest.raises(BatchIncomplete):
        fit.run_leased(CONTEXT, lease())
    with pytest.raises(AirflowFailException, match="Each failed 2 times, so no retry is made"):
        fit.run_leased(CONTEXT, lease())
    with pytest.raises(AirflowFailException):
        fit.execute(CONTEXT)  # without a lease: nothing is left to try
    assert called(tmp_path, "fit") == ["p0", "p0"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"entrypoint": "no_such_module:f"}, "cannot be imported"),
        ({"entrypoint": "toy_stages:nothing"}, "has no function"),
        ({"stage": "polish"}, "its stages are prepare, fit, show"),
        ({"chunk": "oops"}, "must be one element of what the plan returned"),
    ],
)
def test_what_only_the_author_can_mend_is_not_retried(
    tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    _, chunk = planned(tmp_path, "")
    with pytest.raises(AirflowFailException, match=said):
        operator(**{"chunk": chunk, **arguments}).execute(CONTEXT)


@pytest.mark.parametrize(
    "arguments",
    [{"entrypoint": "train.py"}, {"max_failed_ratio": 2}, {"max_failed_ratio": True}, {"gpus": -1}],
)
def test_wrong_arguments_are_refused_when_the_dag_is_parsed(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"allowed|gpus"):
        operator({}, **arguments)


def test_chunk_and_parameters_are_rendered() -> None:
    assert {"chunk", "stage_params", "gpus", "value"} <= set(ProductBatchOperator.template_fields)


def test_a_leased_chunk_queues_with_its_best_products_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, chunk = planned(tmp_path, "", "")
    run_stage(plan, "prepare")
    fit = operator(chunk, "fit", gpus=1)
    bodies: list[Any] = []

    def submit(_: GpuBrokerHook, body: Any, **__: Any) -> None:
        bodies.append(body)
        raise ConnectionError("enough")

    monkeypatch.setattr(GpuBrokerHook, "submit", submit)

    class TaskInstance:
        dag_id, run_id, task_id, map_index, try_number, id = "d", "r", "fit", 0, 1, "x"

    class DagRun:
        run_type = "manual"

    context: Any = {"ti": TaskInstance, "dag_run": DagRun}
    with pytest.raises(ConnectionError):
        fit.execute(context)
    assert bodies[0].value == Chunk.from_xcom(chunk).value == 90
