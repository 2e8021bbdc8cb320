from __future__ import annotations

import pytest

from airflow_gpu_provider.broker.admission import reject_reason
from airflow_gpu_provider.broker.model import DeviceId, Fleet, GpuRequest

from .builders import claim, fleet, fleet_of, node, placed, rejected, request, singles, waiting
from .conftest import Cycle

MIXED = fleet_of(
    node("a", 4, "A100", host="h1"), node("b", 4, "A100", host="h2"), node("v", 8, "V100", host="h3")
)


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        (
            request(9, "A100"),
            "exceeds_fleet",
            "asked 9 x A100 in one gang; the fleet has 8, the largest node 4",
        ),
        (request(1, "H100"), "unknown_model", "the fleet has 8 x A100, 8 x V100 and none of that model"),
        (
            request(1, "V100", host="h1"),
            "unknown_model",
            "host h1 has 4 x A100 and none of that model (8 on other",
        ),
        (
            request(1, memory_mib=90_000),
            "exceeds_memory",
            "0 of 16 devices have so much memory, the largest has 80GiB",
        ),
        (request(9, memory_mib=20_000), "exceeds_memory", "8 of 16 devices have so much memory"),
        (
            request(9, min_tflops=30, strict=True),
            "exceeds_tflops",
            "8 of 16 devices reach that, the fastest has 35",
        ),
        (request(1, host="h9"), "unknown_host", "no node on that host has reported, known hosts: h1, h2, h3"),
        (request(5, "A100", host="h1"), "exceeds_host", "that host has 4, the fleet 8"),
        (request(1, cpu_cores=65), "exceeds_host", "65 cores; the nodes, all empty, can feed 0 of 1"),
        (request(2, host="h1", host_memory_mib=2**20), "exceeds_host", "1024GiB of host memory"),
    ],
)
def test_what_the_fleet_can_never_run_is_rejected_with_numbers(
    asked: GpuRequest, code: str, words: str
) -> None:
    reason = reject_reason(asked, MIXED)
    assert reason is not None
    assert reason.code.value == code
    assert words in reason.text


@pytest.mark.parametrize(
    "asked",
    [
        request(16),
        request(8, "A100"),
        request(4, "A100", host="h1"),
        request(1, min_tflops=1000),  # a soft wish
        request(1, cpu_cores=64),
        request(3, cpu_cores=192),  # 64 for each member: one on each node
        request(1, "A100", spares=99),
        request(1, "NVIDIA A100-SXM4-80GB"),
    ],
)
def test_what_fits_the_empty_fleet_is_admitted(asked: GpuRequest) -> None:
    assert reject_reason(asked, MIXED) is None


def test_an_empty_fleet_says_that_an_agent_is_missing() -> None:
    for some in (Fleet(), fleet(2, 0)):
        reason = reject_reason(request(), some)
        assert reason is not None
        assert reason.code.value == "no_devices"
        assert "start an agent" in reason.text


def test_drained_stale_and_suspect_devices_still_count_as_fleet(cycle: Cycle) -> None:
    some = fleet_of(node("a", 4, unavailable="stale"), node("b", 4, bad={0: "suspect"}))
    assert reject_reason(request(8), some) is None
    assert rejected(cycle(some, [claim("whole", 8)])) == {}


def test_excluded_devices_do_not_count_and_are_named_as_the_blocker() -> None:
    excluded = frozenset({DeviceId("n0/0"), DeviceId("gone/7")})
    assert reject_reason(request(3), fleet(1, 4), excluded) is None
    reason = reject_reason(request(4), fleet(1, 4), excluded)
    assert reason is not None
    assert reason.code.value == "devices_excluded"
    assert "failed on 1 suitable device(s), which leaves 3" in reason.text


def test_a_claim_that_became_impossible_is_rejected_by_the_next_cycle(cycle: Cycle) -> None:
    gang = claim("gang", 8)
    busy = singles(4, on="n0")
    assert list(waiting(cycle(fleet(2, 4), [gang], busy))) == ["gang"]
    assert rejected(cycle(fleet(1, 4), [gang], busy)) == {"gang": "exceeds_fleet"}


def test_cpu_and_memory_of_a_gang_are_spread_over_its_nodes_by_members(cycle: Cycle) -> None:
    some = fleet(2, 4, cpu_cores=16)
    assert sorted(placed(cycle(some, [claim("gang", 8, cpu_cores=32)]))["gang"])[0] == "n0/0"
    assert rejected(cycle(some, [claim("gang", 8, cpu_cores=33)])) == {"gang": "exceeds_host"}


def test_a_rejection_has_the_same_length_for_two_nodes_and_for_two_hundred() -> None:
    few, many = reject_reason(request(9999), fleet(2)), reject_reason(request(9999), fleet(200))
    assert few is not None
    assert many is not None
    assert abs(len(few.text) - len(many.text)) < 5


def test_a_gang_is_never_made_of_slices() -> None:
    slices = fleet_of(node("m", 7, "A100-MIG-1g.10gb"), node("v", 2, "V100"))
    assert reject_reason(request(1, "A100-MIG-1g.10gb"), slices) is None
    assert reject_reason(request(2), slices) is None
    found = reject_reason(request(3), slices)
    assert found is not None and found.code.value == "exceeds_fleet"
    assert "has 2 whole one(s) of these, and its 7 MIG slice(s) serve tasks of one GPU each" in found.text
    named = reject_reason(request(2, "A100-MIG-1g.10gb"), slices)
    assert named is not None and "has 0 whole one(s) of these, and its 7 MIG slice(s)" in named.text


def test_who_asks_for_a_model_does_not_get_a_slice_of_it() -> None:
    found = reject_reason(request(1, "A100"), fleet_of(node("m", 7, "A100-MIG-1g.10gb")))
    assert found is not None and "has 7 x A100-MIG-1g.10gb and none of that model" in found.text
