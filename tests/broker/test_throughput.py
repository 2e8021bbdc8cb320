"""Measured speeds override ratings, carefully."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.broker.flavors import tflops
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.matching import candidates, match_degree
from airflow_gpu_provider.broker.throughput import UNKNOWN, Throughput, ThroughputPolicy, ThroughputTable

from .builders import NOW, fleet_of, node, request

quick = settings(max_examples=150, deadline=None)


def runs(
    model: str, speed: float, number: int = 30, *, task_class: str = "render", days_ago: float = 0
) -> list[Throughput]:
    return [
        Throughput(task_class, model, speed, NOW - timedelta(days=days_ago, minutes=each))
        for each in range(number)
    ]


def degree(table: ThroughputTable, task_class: str | None, model: str, asked: float) -> float:
    """Return how well a model matches: against what is asked, else against the best that is known."""
    speeds = table.speeds(task_class, NOW)
    required = asked or max(speeds.by_model.values(), default=0.0)
    return match_degree(speeds.of(model, tflops(model)), required)


def test_without_measurements_the_ratings_decide() -> None:
    table = ThroughputTable()
    assert table.speeds("render", NOW) == UNKNOWN
    assert round(degree(table, "render", "V100", 35), 2) == 0.43
    assert degree(table, "render", "V100", 0) == 1.0
    assert degree(table, None, "A100", 35) == 1.0


def test_work_that_is_as_fast_on_the_weaker_model_matches_both_alike() -> None:
    table = ThroughputTable([*runs("A100", 10), *runs("V100", 10)])
    a100, v100 = (table.speeds("render", NOW).of(model, tflops(model)) for model in ("A100", "V100"))
    assert a100 / v100 == pytest.approx(1.0, abs=0.1)
    assert degree(table, "render", "V100", 15) == 1.0
    assert degree(table, "render", "V100", 0) > 0.9


def test_the_ratio_of_measured_speeds_becomes_the_ratio_of_degrees() -> None:
    table = ThroughputTable([*runs("A100", 100, 64), *runs("V100", 20, 64)])
    found = {model: degree(table, "render", model, 0) for model in ("A100", "V100")}
    assert found["A100"] == 1.0
    assert found["V100"] == pytest.approx(0.2, abs=0.02)


def test_other_classes_are_not_touched() -> None:
    table = ThroughputTable([*runs("A100", 10), *runs("V100", 10)])
    assert round(degree(table, "tuning", "V100", 35), 2) == 0.43


def test_too_few_runs_and_one_model_alone_say_nothing() -> None:
    assert ThroughputTable([*runs("A100", 10, 30), *runs("V100", 99, 2)]).speeds("render", NOW) == UNKNOWN
    assert ThroughputTable(runs("V100", 99)).speeds("render", NOW) == UNKNOWN


def test_few_runs_weigh_less_than_many() -> None:
    few, many = (
        ThroughputTable([*runs("A100", 10, number), *runs("V100", 10, number)]).speeds("render", NOW).by_model
        for number in (3, 60)
    )
    assert 1.0 < many["A100"] / many["V100"] < few["A100"] / few["V100"] < 35 / 15


def test_a_wild_run_moves_nothing_much() -> None:
    usual = [*runs("A100", 10), *runs("V100", 5)]
    calm = ThroughputTable(usual).speeds("render", NOW).by_model
    wild = ThroughputTable([*usual, *runs("V100", 1e9, 1)]).speeds("render", NOW).by_model
    assert wild["V100"] == pytest.approx(calm["V100"], rel=0.02)


def test_old_runs_fade_behind_new_ones() -> None:
    table = ThroughputTable([*runs("A100", 10), *runs("V100", 1, 20, days_ago=120), *runs("V100", 10, 20)])
    assert degree(table, "render", "V100", 0) > 0.9
    assert table.speeds("render", NOW + timedelta(days=365)) == UNKNOWN


def test_a_model_without_rating_gets_its_speed_from_what_was_measured() -> None:
    table = ThroughputTable([*runs("A100", 70, 64), *runs("Foo 1", 35, 64)])
    speeds = table.speeds("render", NOW)
    assert speeds.by_model["FOO-1"] == pytest.approx(17.5, rel=0.05)


def test_a_speed_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="did some work"):
        ThroughputTable(runs("A100", 0.0, 1))


def test_measured_speeds_order_the_candidates_and_decide_which_are_strictly_fast_enough() -> None:
    layout = Layout.of(fleet_of(node("a", 1, "A100"), node("v", 1, "V100")))
    speeds = ThroughputTable([*runs("A100", 10, 64), *runs("V100", 40, 64)]).speeds("render", NOW)
    wish = request(task_class="render", min_tflops=35)
    rated, measured = candidates(layout, wish), candidates(layout, wish, speeds=speeds)
    assert rated.degree[0] > rated.degree[1]
    assert measured.degree[1] > measured.degree[0]
    strict = request(task_class="render", min_tflops=35, strict=True)
    assert candidates(layout, strict, speeds=speeds).devices.sum(axis=1).tolist() == [0, 1]
    assert candidates(layout, strict).devices.sum(axis=1).tolist() == [1, 0], "where nothing is known"
    free = candidates(layout, request(task_class="render"), speeds=speeds)
    assert free.degree.tolist() == [1.0, 1.0], "no wish is always met"


models = st.sampled_from(["A100", "V100", "H100", "K80", "X-1"])
seen = st.lists(
    st.tuples(models, st.floats(0.01, 1e4), st.integers(1, 12)).map(lambda each: runs(*each)), max_size=8
).map(lambda many: [run for some in many for run in some])


@given(some=seen, unit=st.floats(0.001, 1000))
@quick
def test_the_unit_of_work_does_not_matter(some: list[Throughput], unit: float) -> None:
    other = [Throughput(each.task_class, each.model, each.units_per_s * unit, each.at) for each in some]
    one, two = (ThroughputTable(each).speeds("render", NOW).by_model for each in (some, other))
    assert one == pytest.approx(two, rel=1e-6)


@given(some=seen, model=models, asked=st.floats(0, 100))
@quick
def test_a_degree_lies_between_nothing_and_full_and_the_best_model_is_full(
    some: list[Throughput], model: str, asked: float
) -> None:
    table = ThroughputTable(some, ThroughputPolicy())
    assert 0.0 <= degree(table, "render", model, asked) <= 1.0
    speeds = table.speeds("render", NOW).by_model
    if speeds:
        best = max(speeds, key=lambda each: speeds[each])
        assert degree(table, "render", best, 0) == 1.0
