"""Entry points are checked and loaded with a sentence; fingerprints tell equal from changed."""

from __future__ import annotations

import pytest

from airflow_gpu_provider.catalog.stage import (
    Stage,
    chained_fingerprint,
    check_entrypoint,
    fingerprint,
    load_entrypoint,
)
from airflow_gpu_provider.exceptions import InvalidRequest

ROW = {"sku": "a", "title": "A"}


def mark(**changes: object) -> str:
    usual = {"entrypoint": "m:f", "params": {"steps": 10}, "version": "v1", "row": ROW, "before": "x"}
    return fingerprint(**{**usual, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["module", "module.function", "mod:", ":f", "a b:f", "os:system('x')", "../m:f"]
)
def test_what_is_no_entry_point_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"allowed: 'package\.module:function'"):
        check_entrypoint(text)


def test_a_module_that_is_not_there_says_where_to_put_it() -> None:
    with pytest.raises(InvalidRequest, match="put the module beside the DAG file"):
        load_entrypoint("no_such_module_anywhere:train")


def test_a_function_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(InvalidRequest, match=r"it has .*prepare"):
        load_entrypoint("toy_stages:train")


@pytest.mark.parametrize(
    "change",
    [
        {"entrypoint": "m:g"},
        {"params": {"steps": 11}},
        {"version": "v2"},
        {"row": {**ROW, "title": "B"}},
        {"before": "y"},
    ],
)
def test_every_part_of_what_made_a_result_changes_its_fingerprint(change: dict[str, object]) -> None:
    assert mark(**change) != mark()


def test_numbers_that_templates_made_text_are_the_same() -> None:
    assert mark(params={"steps": "10"}) == mark()


def test_the_chain_equals_the_stages_one_after_the_other() -> None:
    stages = [Stage("one", "m:f", params={"n": 1}), Stage("two", "m:g")]
    first = fingerprint(entrypoint="m:f", params={"n": 1}, version="v", row=ROW)
    second = fingerprint(entrypoint="m:g", params={}, version="v", row=ROW, before=first)
    assert chained_fingerprint(stages, version="v", row=ROW) == second


def test_stage_names_become_folders_so_they_are_plain() -> None:
    with pytest.raises(InvalidRequest, match="lower-case letters"):
        Stage("../train", "m:f")
