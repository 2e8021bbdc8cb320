"""Measured speeds decide between models, against prices, and can be learned while claims wait."""

from __future__ import annotations

from datetime import datetime, timezone

import numpy as np
import pytest

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.layout import Kind
from airflow_gpu_provider.broker.model import Claim, ClaimId, CyclePolicy, GpuRequest
from airflow_gpu_provider.broker.speed_costs import SpeedCosts
from airflow_gpu_provider.broker.throughput import UNKNOWN, Speeds, Throughput, ThroughputTable
from tests.simulation.simulated import fleet

NOW = datetime(2026, 3, 1, tzinfo=timezone.utc)
KINDS = (Kind("P100", 16_384, 10.6), Kind("V100", 16_384, 15.0))
#: One runs faster on the model that is rated slower, the other gains much from the fast one.
LEARNED = {"recommend": Speeds({"P100": 20.0, "V100": 10.0}), "train": Speeds({"P100": 5.0, "V100": 20.0})}
ON = fleet({"p": ("P100", 1), "v": ("V100", 1)})


def placed(engine: Engine, name: str, request: GpuRequest) -> str:
    """Submit a claim; return the node of its device."""
    engine.submit(Claim(ClaimId(name), request, NOW))
    (placement,) = engine.turn(NOW).placements
    return placement.devices[0].split("/")[0]


@pytest.mark.parametrize(("task_class", "node"), [("recommend", "p"), ("train", "v")])
def test_a_class_gets_the_model_on_which_it_was_measured_fastest(task_class: str, node: str) -> None:
    engine = Engine(CyclePolicy(), ON, learned=LEARNED)
    assert placed(engine, "one", GpuRequest(task_class=task_class)) == node


def test_what_is_learned_later_counts_from_then_on() -> None:
    first, second = (Engine(CyclePolicy(), ON, recent=[GpuRequest(task_class="train")]) for _ in range(2))
    second.learn(LEARNED)
    other = {"train": Speeds({"P100": 20.0, "V100": 5.0})}
    first.learn(other)
    assert placed(second, "one", GpuRequest(task_class="train")) == "v"
    assert placed(first, "one", GpuRequest(task_class="train")) == "p"


def test_the_match_degree_is_of_the_measured_speed() -> None:
    engine = Engine(CyclePolicy(), ON, learned=LEARNED)
    engine.submit(Claim(ClaimId("soft"), GpuRequest(task_class="recommend", min_tflops=15.0), NOW))
    (placement,) = engine.turn(NOW).placements
    assert (placement.devices[0], placement.match_degree) == ("p/0", 1.0)


def best(costs: SpeedCosts, request: GpuRequest, leased: float) -> str | None:
    """Return the model that costs the request least; None = none is better than another."""
    found = costs.of(request, leased)
    return None if found is None else KINDS[int(np.argmin(found))].model


def test_a_full_fleet_leaves_the_fast_model_to_those_who_gain_most() -> None:
    a, b = GpuRequest(task_class="a"), GpuRequest(task_class="b")
    costs = SpeedCosts(
        KINDS, {"a": Speeds({"P100": 9.0, "V100": 10.0}), "b": Speeds({"P100": 1.0, "V100": 10.0})}
    )
    costs.renew({a: 1, b: 1})
    assert (best(costs, a, 0.0), best(costs, a, 1.0)) == ("V100", "P100")
    assert (best(costs, b, 0.0), best(costs, b, 1.0)) == ("V100", "V100")


def test_what_was_never_measured_counts_by_the_ratings_unless_it_says_what_it_needs() -> None:
    costs = SpeedCosts(KINDS, LEARNED)
    assert best(costs, GpuRequest(), 0.0) == best(costs, GpuRequest(task_class="new"), 0.0) == "V100"
    assert best(costs, GpuRequest(min_tflops=5.0), 0.0) is None
    assert costs.speeds("new") == costs.speeds(None) == UNKNOWN


def test_models_without_a_rating_cost_all_the_same() -> None:
    unrated = (Kind("X", 1, 0.0), Kind("Y", 1, 0.0))
    found = SpeedCosts(unrated).of(GpuRequest(), 0.5)
    assert found is not None and found.tolist() == [0.0, 0.0]


def test_a_table_tells_only_the_classes_that_it_knows_enough_of() -> None:
    runs = [
        Throughput("a", model, speed, NOW) for model, speed in (("P100", 2.0), ("V100", 1.0)) for _ in "123"
    ]
    table = ThroughputTable([*runs, Throughput("b", "P100", 1.0, NOW)])
    assert set(table.learned(NOW)) == {"a"}
