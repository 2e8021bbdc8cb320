"""One stage over many products: what is good gets done once, what is bad is told, nothing stops the rest."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from catalog_builders import called, make_plan, row, run_all, run_stage

from airflow_gpu_provider.catalog.ledger import Ledger, Outcome, Status
from airflow_gpu_provider.catalog.plan import Plan, Selection
from airflow_gpu_provider.catalog.runner import describe
from airflow_gpu_provider.catalog.stage_run import StageRun
from airflow_gpu_provider.exceptions import InvalidRequest, LeaseLost


def outcome(plan: Plan, stage: str, sku: str) -> Outcome:
    found = Ledger(plan.folders).read(stage, sku)
    assert found is not None
    return found


def test_a_product_goes_through_all_stages_into_its_folder(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a")])
    run_all(plan)
    final = plan.results.version("a", "20261101T080000Z")
    assert (final / "model.txt").read_text() == "The a at 10"
    assert json.loads(plan.results.latest("a").read_text())["version"] == "20261101T080000Z"
    fitted = outcome(plan, "fit", "a")
    assert (fitted.status, fitted.attempt, fitted.device, fitted.device_model) == (
        Status.DONE,
        1,
        "sim-0",
        "A100",
    )
    assert fitted.figures == {"loss": 0.25}
    assert not plan.folders.work("a", "20261101T080000Z").exists()


def test_one_bad_product_of_each_kind_does_not_stop_the_others(tmp_path: Path) -> None:
    rows = [row("good"), row("bad", does="unusable"), row("ugly", does="raise"), row("last", daily_views=1)]
    plan, _ = make_plan(tmp_path, rows)
    reports = run_all(plan)
    assert [report.as_json() for report in reports] == [
        {"done": 3, "reused": 0, "unusable": 1, "skipped": 0, "failed": 0},
        {"done": 2, "reused": 0, "unusable": 0, "skipped": 1, "failed": 1},
        {"done": 2, "reused": 0, "unusable": 0, "skipped": 2, "failed": 0},
    ]
    assert outcome(plan, "prepare", "bad").reason == "only 3 views; at least 16 are needed"
    reason = str(outcome(plan, "fit", "ugly").reason)
    assert reason.startswith("ValueError: no geometry in ugly")
    assert "toy_stages.py" in reason


def test_a_retry_does_only_what_failed(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a"), row("b", does="raise once"), row("c", does="unusable")])
    run_stage(plan, "prepare")
    assert len(run_stage(plan, "fit").failures) == 1
    assert run_stage(plan, "prepare").as_json()["reused"] == 2
    report = run_stage(plan, "fit")
    assert (report.done, report.reused, report.failures) == (1, 1, [])
    assert called(tmp_path, "prepare") == ["a", "b", "c"]
    assert called(tmp_path, "fit") == ["a", "b", "b"]
    assert outcome(plan, "fit", "b").attempt == 2


def test_a_product_that_always_fails_is_left_alone_after_three_times(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a", does="raise")])
    run_stage(plan, "prepare")
    hopeless = [run_stage(plan, "fit").hopeless for _ in range(5)]
    assert hopeless == [0, 0, 1, 1, 1]
    assert len(called(tmp_path, "fit")) == 3


def test_a_first_stage_begins_with_empty_scratch(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a", does="leave half")])
    assert len(run_stage(plan, "prepare").failures) == 1
    assert run_stage(plan, "prepare").done == 1


def test_a_new_run_gives_it_another_chance(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a", does="raise")])
    run_stage(plan, "prepare")
    for _ in range(4):
        run_stage(plan, "fit")
    other, _ = make_plan(tmp_path, [row("a", does="raise")], run_id="run-2")
    run_all(other)
    assert len(called(tmp_path, "fit")) == 4


def test_changed_parameters_do_the_stage_and_what_follows_again(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a")])
    run_stage(plan, "prepare")
    run_stage(plan, "fit", steps=10)
    assert run_stage(plan, "fit", steps="10").reused == 1
    assert run_stage(plan, "fit", steps=20).done == 1
    run_stage(plan, "show")
    final = plan.results.version("a", "20261101T080000Z")
    assert (final / "model.txt").read_text() == "The a at 20"


def test_a_stage_redone_after_its_scratch_is_gone_says_so(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a")])
    run_all(plan)
    report = run_stage(plan, "fit", steps=20)
    assert "start a new run with `redo`" in report.failures[0][1]


def test_clearing_tasks_of_a_finished_run_does_nothing_twice(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a"), row("b")])
    run_all(plan)
    assert [report.reused for report in run_all(plan)] == [2, 2, 2]
    assert called(tmp_path, "show") == ["a", "b"]


def test_a_redo_replaces_the_same_version(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a")])
    run_all(plan)
    final = plan.results.version("a", "20261101T080000Z")
    (final / "model.txt").write_text("to be replaced")
    redone, _ = make_plan(tmp_path, [row("a")], run_id="run-2", selection=Selection(redo=True))
    assert [report.done for report in run_all(redone)] == [1, 1, 1]
    assert (final / "model.txt").read_text() == "The a at 10"


def test_an_older_version_made_later_keeps_its_folder_but_not_the_pointer(tmp_path: Path) -> None:
    live, _ = make_plan(tmp_path, [row("a", updated_at="2026-11-20")])
    run_all(live)
    backfill, _ = make_plan(tmp_path, [row("a", updated_at="2026-11-10")], run_id="backfill__1")
    run_all(backfill)
    assert live.results.version("a", "20261110T000000Z").is_dir()
    assert json.loads(live.results.latest("a").read_text())["version"] == "20261120T000000Z"


def test_a_lost_lease_stops_the_chunk_and_costs_no_attempt(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a", does="raise once"), row("b")])
    run_stage(plan, "prepare")

    def check() -> None:
        if (tmp_path / "in" / "calls-fit.txt").exists():
            raise LeaseLost("gone")

    with pytest.raises(LeaseLost):
        run_stage(plan, "fit", check=check)
    interrupted = outcome(plan, "fit", "a")
    assert (interrupted.status, interrupted.attempt) == (Status.INTERRUPTED, 0)
    assert called(tmp_path, "fit") == ["a"]
    assert run_stage(plan, "fit").done == 2
    assert outcome(plan, "fit", "a").attempt == 1


def test_a_full_disk_is_not_the_products_fault(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a", does="fill the disk"), row("b")])
    run_stage(plan, "prepare")
    with pytest.raises(OSError) as caught:
        run_stage(plan, "fit")
    assert caught.value.errno == errno.ENOSPC
    assert outcome(plan, "fit", "a").status is Status.INTERRUPTED
    assert called(tmp_path, "fit") == ["a"]


def test_final_files_of_an_early_stage_are_refused_not_dropped(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a", does="write final files")])
    run_stage(plan, "prepare")
    assert "only the last stage (show) publishes" in run_stage(plan, "fit").failures[0][1]


def test_figures_that_json_does_not_have_become_unknown(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a", does="overflow")])
    run_stage(plan, "prepare")
    run_stage(plan, "fit")
    assert outcome(plan, "fit", "a").figures == {"loss": None}


def test_a_stage_that_returns_no_figures_is_told_what_it_may_return(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a")])
    report = run_stage(plan, "prepare", entrypoint="toy_stages:returns_text")
    assert "returned str; allowed: a mapping" in report.failures[0][1]


def test_a_stage_that_is_not_in_the_plan_is_refused(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a")])
    with pytest.raises(InvalidRequest, match="its stages are prepare, fit, show"):
        StageRun(plan, "polish", "toy_stages:show")


def test_a_damaged_outcome_is_done_again_not_believed(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a")])
    run_stage(plan, "prepare")
    plan.folders.outcome("prepare", "a").write_text('{"sku": "a", "status": "do')
    assert run_stage(plan, "prepare").done == 1


def test_two_processes_on_one_chunk_do_each_product_once(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a"), row("b")])
    child = os.fork()
    if child == 0:
        # An orphan of an earlier try: it works on while its retry begins.
        try:
            run_stage(plan, "prepare", entrypoint="toy_stages:slow")
        finally:
            os._exit(0)
    report = run_stage(plan, "prepare", entrypoint="toy_stages:slow")
    os.waitpid(child, 0)
    assert report.done + report.reused == 2
    assert sorted(called(tmp_path, "slow")) == ["a", "b"]


def test_a_long_reason_keeps_its_head_and_its_tail() -> None:
    try:
        raise ValueError("begin " + "x" * 5000)
    except ValueError as error:
        text = describe(error)
    assert text.startswith("ValueError: begin")
    assert "test_runner.py" in text
    assert len(text) < 2000
