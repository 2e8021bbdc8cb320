"""A process that dies by SIGKILL in mid-stage costs at most the product it was at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from catalog_builders import called, make_plan, row, run_stage

from airflow_gpu_provider.catalog.ledger import Ledger, Status
from airflow_gpu_provider.catalog.plan import Plan, Selection

HERE = Path(__file__).parent

RUN = """
import sys
from pathlib import Path
from catalog_builders import run_stage
from airflow_gpu_provider.catalog.plan import load_plan

for stage in sys.argv[2:]:
    run_stage(load_plan(Path(sys.argv[1])), stage)
"""


def run_in_process(plan: Plan, *stages: str) -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    command = [sys.executable, "-c", RUN, str(plan.folders.plan), *stages]
    return subprocess.run(command, env=environment, check=False, capture_output=True).returncode


def test_after_a_kill_the_rerun_does_the_rest_and_nothing_twice(tmp_path: Path) -> None:
    rows = [row(f"p{number}", daily_views=9 - number) for number in range(4)]
    rows[1]["does"] = "kill once"
    rows[2]["does"] = "kill while writing"
    plan, _ = make_plan(tmp_path, rows)
    assert run_in_process(plan, "prepare", "fit", "show") == -signal.SIGKILL  # in fit of p1
    killed = Ledger(plan.folders).read("fit", "p1")
    assert killed is not None and killed.status is Status.RUNNING
    assert run_in_process(plan, "prepare", "fit", "show") == -signal.SIGKILL  # in show of p2
    assert not plan.results.version("p2", "20261101T080000Z").exists()
    assert run_in_process(plan, "prepare", "fit", "show") == 0
    for number in range(4):
        final = plan.results.version(f"p{number}", "20261101T080000Z")
        assert (final / "model.txt").read_text() == f"The p{number} at 10"
        assert sorted(path.name for path in final.iterdir()) == [".outcome.json", "model.txt"]
    assert Counter(called(tmp_path, "prepare")) == {"p0": 1, "p1": 1, "p2": 1, "p3": 1}
    assert Counter(called(tmp_path, "fit")) == {"p0": 1, "p1": 2, "p2": 1, "p3": 1}
    assert Counter(called(tmp_path, "show")) == {"p0": 1, "p1": 1, "p2": 2, "p3": 1}


def test_a_product_that_kills_its_process_is_put_aside_after_three_times(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("poison", does="kill", daily_views=9), row("good")])
    run_stage(plan, "prepare")
    codes = [run_in_process(plan, "fit") for _ in range(4)]
    assert codes == [-signal.SIGKILL] * 3 + [0]
    poison, good = (Ledger(plan.folders).read("fit", sku) for sku in ("poison", "good"))
    assert poison is not None and good is not None
    assert poison.status is Status.FAILED
    assert "was killed 3 times in fit" in str(poison.reason)
    assert good.status is Status.DONE


def test_a_kill_during_a_redo_does_not_take_the_former_runs_result_for_its_own(tmp_path: Path) -> None:
    first, _ = make_plan(tmp_path, [row("a")])
    for stage in first.stages:
        run_stage(first, stage)
    redo, _ = make_plan(tmp_path, [row("a")], run_id="run-2", selection=Selection(redo=True))
    for stage in redo.stages[:-1]:
        run_stage(redo, stage)
    published = Ledger(first.folders).read("show", "a")
    assert published is not None
    Ledger(redo.folders).write(replace(published, status=Status.RUNNING, run_id="run-2"))
    assert run_stage(redo, "show").done == 1


def test_a_kill_between_publishing_and_the_ledger_costs_nothing(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a")])
    for stage in plan.stages:
        run_stage(plan, stage)
    ledger = Ledger(plan.folders)
    done = ledger.read("show", "a")
    assert done is not None
    # As if the process had died right after the rename.
    ledger.write(replace(done, status=Status.RUNNING, finished_at=None))
    plan.results.latest("a").unlink()
    assert run_stage(plan, "show").reused == 1
    assert ledger.read("show", "a") == done
    assert plan.results.latest("a").exists()
    assert called(tmp_path, "show") == ["a"]
