"""The summary names every product with its status, whatever became of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from catalog_builders import START, make_plan, row, run_all, run_stage

from airflow_gpu_provider.catalog.ledger import Ledger
from airflow_gpu_provider.catalog.plan import Plan
from airflow_gpu_provider.catalog.summary import broken_sentence, build_summary, write_summary


def entries(plan: Plan) -> dict[str, dict[str, Any]]:
    products: Any = build_summary(plan, finished_at=START)["products"]
    return {entry["sku"]: entry for entry in products}


def test_every_way_to_end_has_its_status_and_reason(tmp_path: Path) -> None:
    rows = [
        row("good", daily_views=9),
        row("poor", daily_views=8, does="poor"),
        row("bad", daily_views=7, does="unusable"),
        row("ugly", daily_views=6, does="raise"),
    ]
    plan, _ = make_plan(tmp_path, rows)
    run_all(plan)
    found = entries(plan)
    assert list(found) == ["good", "poor", "bad", "ugly"]
    assert {sku: entry["status"] for sku, entry in found.items()} == {
        "good": "done",
        "poor": "below_threshold",
        "bad": "unusable",
        "ugly": "failed",
    }
    assert found["bad"]["reason"] == "prepare: only 3 views; at least 16 are needed"
    assert found["ugly"]["reason"].startswith("fit: ValueError: no geometry")
    assert found["ugly"]["output_dir"] is None
    good = found["good"]
    assert (good["device"], good["device_model"]) == ("sim-0", "A100")
    assert good["figures"]["iou"] == 0.95
    assert set(good["seconds"]) == {"prepare", "fit", "show"}
    assert (Path(good["output_dir"]) / "model.txt").exists()


def test_a_half_done_run_says_what_is_missing(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a")])
    assert entries(plan)["a"]["reason"] == "prepare was never begun; see its task's log"
    run_stage(plan, "prepare")
    found = entries(plan)["a"]
    assert (found["status"], found["reason"]) == ("missing", "fit was never begun; see its task's log")
    ledger = Ledger(plan.folders)
    done = ledger.read("prepare", "a")
    assert done is not None
    ledger.write(type(done).from_json({**done.as_json(), "stage": "fit", "status": "running"}))
    assert entries(plan)["a"]["reason"] == "fit did not end: its process was stopped"


def test_reused_products_show_the_figures_of_the_run_that_made_them(tmp_path: Path) -> None:
    first, _ = make_plan(tmp_path, [row("a")])
    run_all(first)
    second, _ = make_plan(
        tmp_path, [row("c", daily_views=1), row("a"), row("b", daily_views=99)], run_id="run-2"
    )
    run_all(second)
    found = entries(second)
    assert list(found) == ["b", "a", "c"]
    assert (found["a"]["status"], found["a"]["run_id"], found["b"]["run_id"]) == ("done", "run-1", "run-2")
    assert set(found["a"]["seconds"]) == {"prepare", "fit", "show"}


def test_only_products_that_should_work_make_a_run_fail(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("poor", does="poor"), row("bad", does="unusable")])
    run_all(plan)
    assert broken_sentence(list(entries(plan).values())) is None
    other, _ = make_plan(tmp_path, [row("ugly", does="raise"), row("good")], run_id="run-2")
    run_all(other)
    sentence = str(broken_sentence(list(entries(other).values())))
    assert sentence.startswith("1 of 2 products are not done: ugly (fit: ValueError: no geometry in ugly)")


def test_the_photo_is_the_first_image_of_the_folder_that_the_row_names(tmp_path: Path) -> None:
    views = tmp_path / "in" / "views" / "a"
    views.mkdir(parents=True)
    for name in ("cameras.json", "01.png", "00.PNG"):
        (views / name).write_text("")
    plan, _ = make_plan(tmp_path, [row("a"), row("b")])
    found = entries(plan)
    assert found["a"]["photo"] == str(views / "00.PNG")
    assert found["b"]["photo"] is None


def test_the_file_is_strict_json_with_counts(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a", does="overflow")])
    run_all(plan)
    write_summary(plan, finished_at=START)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    read = json.loads(plan.folders.summary.read_text(), parse_constant=refuse)
    assert read["counts"] == {"done": 1, "below_threshold": 0, "unusable": 0, "failed": 0, "missing": 0}
