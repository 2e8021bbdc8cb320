from __future__ import annotations

import pytest

from airflow_gpu_provider.broker.matching import accepts, match_degree
from airflow_gpu_provider.broker.model import GpuRequest

from .builders import claim, fleet, fleet_of, node, placed, rejected, request, singles
from .conftest import Cycle


@pytest.mark.parametrize(
    ("tflops", "required", "degree"),
    [(35, 35, 1.0), (15, 35, 0.43), (70, 35, 1.0), (15, 0, 1.0), (0, 35, 0.0)],
)
def test_match_degree_is_speed_over_need_and_at_most_one(
    tflops: float, required: float, degree: float
) -> None:
    assert round(match_degree(tflops, required), 2) == degree


def test_model_and_memory_filter_hard_and_speed_only_when_strict() -> None:
    def suits(wish: GpuRequest) -> bool:
        return accepts(wish, model="NVIDIA A100-SXM4-80GB", memory_mib=81_920, tflops=35.0)

    assert suits(request(model="A100|H100", memory_mib=81_920))
    assert not suits(request(model="H100"))
    assert not suits(request(memory_mib=81_921))
    assert suits(request(min_tflops=100))
    assert not suits(request(min_tflops=100, strict=True))


def test_a_full_match_is_preferred_and_a_lower_one_is_the_fallback(cycle: Cycle) -> None:
    some = fleet_of(node("a", 1, "A100"), node("v", 1, "V100"))
    wish = claim("one", min_tflops=35)
    first = cycle(some, [wish])
    assert placed(first) == {"one": ["a/0"]}
    assert first.placements[0].match_degree == 1.0
    fallback = cycle(some, [wish], singles(1, on="a"))
    assert placed(fallback) == {"one": ["v/0"]}
    assert round(fallback.placements[0].match_degree, 2) == 0.43


def test_a_better_match_wins_over_any_load_and_packing(cycle: Cycle) -> None:
    some = fleet_of(node("a", 4, "A100", load=0.49), node("v", 4, "V100", load=0.0))
    assert placed(cycle(some, [claim("one", min_tflops=35)])) == {"one": ["a/0"]}


def test_a_gang_spreads_over_full_matches_before_it_takes_one_weak_node(cycle: Cycle) -> None:
    some = fleet_of(node("a", 1, "A100"), node("b", 1, "A100"), node("v", 2, "V100"))
    decisions = cycle(some, [claim("gang", 2, min_tflops=35)])
    assert sorted(placed(decisions)["gang"]) == ["a/0", "b/0"]


def test_the_degree_of_a_mixed_gang_is_its_weakest_members(cycle: Cycle) -> None:
    some = fleet_of(node("a", 1, "A100"), node("v", 1, "V100"))
    (placement,) = cycle(some, [claim("gang", 2, min_tflops=35)]).placements
    assert round(placement.match_degree, 2) == 0.43


def test_a_strict_request_refuses_the_fallback(cycle: Cycle) -> None:
    decisions = cycle(fleet(1, 4, "V100"), [claim("one", min_tflops=35, strict=True)])
    assert rejected(decisions) == {"one": "exceeds_tflops"}


def test_what_is_just_fast_enough_is_taken_before_what_is_faster(cycle: Cycle) -> None:
    some = fleet_of(node("fast", 1, "H100"), node("right", 1, "A100"))
    assert placed(cycle(some, [claim("one", min_tflops=35)])) == {"one": ["right/0"]}


def test_a_model_no_one_has_rated_matches_no_wish_for_speed_but_runs_without_one(cycle: Cycle) -> None:
    some = fleet(1, 1, "MYSTERY")
    assert placed(cycle(some, [claim("plain")])) == {"plain": ["n0/0"]}
    (placement,) = cycle(some, [claim("fast", min_tflops=5)]).placements
    assert placement.match_degree == 0.0
