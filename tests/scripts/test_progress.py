"""Progress is told from the run's files alone: what is done, failed, left, and how long the rest takes."""

from __future__ import annotations

import io
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from rich.console import Console

from airflow_gpu_provider.catalog.atomic import write_json
from airflow_gpu_provider.catalog.ledger import Ledger, Outcome, Status
from airflow_gpu_provider.catalog.plan import Plan, PlannedProduct
from scripts.demo import results_table
from scripts.progress import ProgressDisplay, RunProgress, RunView, describe

STAGES = ("preprocess", "train", "postprocess")
UPDATED = datetime(2026, 11, 30, tzinfo=timezone.utc)


class Run:
    """A run of four products, written as the pipeline writes it."""

    def __init__(self, output: Path) -> None:
        self.view = RunView(output, "run 1")
        self.folders = self.view.folders

    def plan(self, *, products: int = 4, age_s: float = 60.0) -> None:
        self.folders.root.mkdir(parents=True)
        lines = [PlannedProduct(f"P{i}", UPDATED, 1.0, {}).as_line() for i in range(products)]
        self.folders.todo.write_bytes(b"".join(lines))
        started = datetime.now(timezone.utc) - timedelta(seconds=age_s)
        plan = Plan("run 1", "c.csv", str(self.folders.output), STAGES, started.isoformat(), products, 2, 1)
        write_json(self.folders.plan, plan.as_json())

    def outcome(
        self,
        sku: str,
        stage: str,
        status: Status,
        seconds: float | None = None,
        started_at: str = UPDATED.isoformat(),
    ) -> None:
        Ledger(self.folders).write(Outcome(sku, "v1", stage, status, 1, "f", started_at, seconds=seconds))

    def read(self) -> RunProgress:
        progress = self.view.read()
        assert progress is not None
        return progress


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_before_the_plan_there_is_nothing_to_tell(run: Run) -> None:
    assert run.view.read() is None
    assert describe(None, leased=0, devices=4) == "planning · 0 of 4 devices leased"


def test_products_are_done_failed_or_left(run: Run) -> None:
    run.plan()
    for stage in STAGES:
        run.outcome("P0", stage, Status.DONE, 1.0)
    run.outcome("P1", "preprocess", Status.UNUSABLE)
    run.outcome("P2", "preprocess", Status.DONE, 1.0)
    run.outcome("P2", "train", Status.RUNNING)
    progress = run.read()
    assert (progress.done, progress.failed, progress.left, progress.reused) == (1, 1, 2, 2)
    assert progress.at_work == {"train": 1}
    words = describe(progress, leased=1, devices=4)
    assert words.startswith("1 done · 1 failed · 2 left · 2 reused · 1 of 4 devices leased · ETA ")


def test_a_long_stage_weighs_more_than_a_short_one(run: Run) -> None:
    run.plan(products=2, age_s=60)
    for stage, seconds in zip(STAGES, (1.0, 18.0, 1.0), strict=True):
        run.outcome("P0", stage, Status.DONE, seconds)
    run.outcome("P1", "preprocess", Status.DONE, 1.0)
    progress = run.read()
    assert progress.share == pytest.approx(21 / 40)
    assert progress.eta_s == pytest.approx(60 * 19 / 21, rel=0.05)


def test_the_first_estimate_counts_what_is_under_way(run: Run) -> None:
    run.plan(products=2, age_s=60)
    for sku in ("P0", "P1"):
        run.outcome(sku, "preprocess", Status.DONE, 5.0)
    begun = (datetime.now(timezone.utc) - timedelta(seconds=50)).isoformat()
    run.outcome("P0", "train", Status.RUNNING, started_at=begun)
    progress = run.read()  # train is taken for 100 s, postprocess for as long as the longest that is known
    assert progress.share == pytest.approx((2 * 5 + 50) / (2 * (5 + 100 + 5)), rel=0.02)
    assert progress.share < 0.5, "half of the first of two trainings is not half of the work"


def test_all_given_up_is_all_of_the_work(run: Run) -> None:
    run.plan(products=2)
    for sku in ("P0", "P1"):
        run.outcome(sku, "preprocess", Status.DONE, 1.0)
        run.outcome(sku, "train", Status.FAILED)
    progress = run.read()
    assert (progress.share, progress.left) == (1.0, 0)


def test_an_interrupted_stage_is_not_a_failure(run: Run) -> None:
    run.plan(products=1)
    run.outcome("P0", "preprocess", Status.INTERRUPTED)
    assert (run.read().failed, run.read().left) == (0, 1)


def test_without_a_terminal_a_line_is_printed_now_and_then() -> None:
    console = Console(file=io.StringIO(), width=200)
    with ProgressDisplay(console) as display:
        for _ in range(3):
            display.show(RunProgress(products=3, done=1), leased=2, devices=4)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert printed.count("1 done · 0 failed · 2 left · 2 of 4 devices leased · ETA —") == 1


def test_the_table_shows_every_product_and_what_is_unknown_as_such() -> None:
    entry = {
        "title": "Chair",
        "status": "done",
        "figures": {"iou": 0.951, "psnr": 24.26},
        "seconds": {"train": 9.0, "preprocess": 1.0},
        "device_model": "A100",
        "reason": None,
    }
    broken = {**entry, "title": "Lamp", "status": "unusable", "figures": {}, "device_model": None}
    broken["reason"] = "preprocess: no object in view 3\nmore"
    console = Console(file=io.StringIO(), width=160)
    console.print(results_table({"products": [entry, broken]}))
    assert isinstance(console.file, io.StringIO)
    chair, lamp = [line for line in console.file.getvalue().splitlines() if "Chair" in line or "Lamp" in line]
    assert [cell.strip() for cell in chair.split("│")[1:6]] == ["Chair", "done", "0.951", "24.3", "10.0"]
    assert [cell.strip() for cell in lamp.split("│")[1:5]] == ["Lamp", "unusable", "N/A", "N/A"]
    assert "no object in view 3" in lamp
