"""A plan has every wanted product once, the most valuable first, and leaves out what is already there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from catalog_builders import START, make_plan, row, run_all, toy_stages, write_catalog

from airflow_gpu_provider.catalog.layout import RunFolders, path_name
from airflow_gpu_provider.catalog.plan import Selection, load_plan, read_products, write_plan
from airflow_gpu_provider.exceptions import InvalidRequest, ManifestInvalid

ROWS = [row("cold", daily_views=1), row("hot", daily_views=9), row("warm", daily_views=5, category="lamps")]


def planned(folder: Path, **options: object) -> list[str]:
    plan, _ = make_plan(folder, ROWS, **options)  # type: ignore[arg-type]
    return [product.sku for product in read_products(plan.folders.todo)]


def test_hot_products_come_first(tmp_path: Path) -> None:
    assert planned(tmp_path) == ["hot", "warm", "cold"]


def test_chunks_point_at_their_lines_and_carry_the_best_value(tmp_path: Path) -> None:
    rows = [row(f"p{number}", daily_views=number, title="Ünïcode, \n quoted") for number in range(7)]
    plan, chunks = make_plan(tmp_path, rows, chunk_size=3)
    read = [
        [product.sku for product in read_products(plan.folders.todo, offset=chunk.offset, count=chunk.count)]
        for chunk in chunks
    ]
    assert read == [["p6", "p5", "p4"], ["p3", "p2", "p1"], ["p0"]]
    assert [chunk.value for chunk in chunks] == [60, 30, 0]
    assert [chunk.label for chunk in chunks] == ["p6 and 2 more", "p3 and 2 more", "p0"]


def test_the_header_can_be_read_back(tmp_path: Path) -> None:
    plan, chunks = make_plan(tmp_path, ROWS)
    assert load_plan(Path(chunks[0].plan)) == plan
    assert plan.stages == ("prepare", "fit", "show")


def test_too_many_chunks_become_fewer_and_the_plan_says_so(tmp_path: Path) -> None:
    rows = [row(f"p{number}") for number in range(600)]
    plan, chunks = make_plan(tmp_path, rows, chunk_size=1)
    assert len(chunks) == 200
    assert sum(chunk.count for chunk in chunks) == 600
    assert "chunk_size 1 would make 600 mapped tasks" in plan.notes[0]


def test_the_limit_keeps_the_most_valuable(tmp_path: Path) -> None:
    assert planned(tmp_path, selection=Selection(limit=2)) == ["hot", "warm"]


def test_a_category_selects_and_an_unknown_one_is_answered_with_the_known(tmp_path: Path) -> None:
    assert planned(tmp_path, selection=Selection(categories=("Lamps",))) == ["warm"]
    with pytest.raises(ManifestInvalid, match="no product is in the categories sofas; it has chairs, lamps"):
        planned(tmp_path, selection=Selection(categories=("sofas",)))


def test_a_bad_manifest_leaves_no_plan(tmp_path: Path) -> None:
    with pytest.raises(ManifestInvalid):
        make_plan(tmp_path, [*ROWS, row("bad", price="x")])
    assert [path.name for path in (tmp_path / "out" / "runs" / "run-1").iterdir()] == []


def test_published_products_are_reused_and_changed_ones_are_not(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, ROWS)
    run_all(plan)
    again, chunks = make_plan(tmp_path, ROWS, run_id="run-2")
    assert (again.products, again.reused, chunks) == (0, 3, [])
    changed = [{**ROWS[0], "title": "New title"}, *ROWS[1:]]
    third, _ = make_plan(tmp_path, changed, run_id="run-3")
    assert [product.sku for product in read_products(third.folders.todo)] == ["cold"]
    assert [product.sku for product in read_products(third.folders.reused)] == ["hot", "warm"]


def test_other_parameters_and_a_redo_reuse_nothing(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, ROWS)
    run_all(plan)
    assert make_plan(tmp_path, ROWS, run_id="run-2", steps=11)[0].reused == 0
    assert make_plan(tmp_path, ROWS, run_id="run-3", selection=Selection(redo=True))[0].reused == 0
    assert make_plan(tmp_path, ROWS, run_id="run-4", steps="10")[0].reused == 3


def test_a_newer_row_is_a_version_of_its_own(tmp_path: Path) -> None:
    plan, _ = make_plan(tmp_path, [row("a")])
    run_all(plan)
    newer, _ = make_plan(tmp_path, [row("a", updated_at="2026-11-02")], run_id="run-2")
    assert newer.products == 1


def test_the_weight_is_for_the_broker_only(tmp_path: Path) -> None:
    folders = RunFolders(tmp_path / "out", "run-1")
    plan, chunks = write_plan(
        write_catalog(tmp_path, ROWS), folders, toy_stages(), chunk_size=9, started_at=START, weight=3.0
    )
    assert chunks[0].value == 9 * 10 * 3
    assert next(read_products(plan.folders.todo)).value == 90


def test_a_plan_that_is_gone_says_what_must_be_shared(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="shared by all workers"):
        load_plan(tmp_path / "plan.json")


def test_run_ids_become_safe_and_stay_different() -> None:
    names = {
        path_name(text) for text in ("manual__2026-11-30T12:00:00+00:00", "manual__2026-11-30T12.00.00+00:00")
    }
    assert len(names) == 2
    for text in ("../../etc", "a/b", "", ".", "..", "ü" * 300, "\0"):
        name = path_name(text)
        assert "/" not in name and name not in ("", ".", "..") and len(name) < 200 and name.isascii()
    assert path_name("nightly_2026-11-30") == "nightly_2026-11-30"


def test_planning_twice_in_one_run_gives_the_same_plan(tmp_path: Path) -> None:
    first = make_plan(tmp_path, ROWS)
    assert make_plan(tmp_path, ROWS) == first
    assert json.loads(first[0].folders.plan.read_text())["products"] == 3
