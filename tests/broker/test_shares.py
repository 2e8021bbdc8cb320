"""Parts of devices: what a claim of so much memory takes of each, and that nobody gets more than there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.broker.admission import reject_reason
from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.fair_share import FairShare
from airflow_gpu_provider.broker.model import (
    ClaimId,
    CyclePolicy,
    DeviceId,
    Fleet,
    GpuRequest,
    Lease,
    LeaseId,
    Placement,
)
from airflow_gpu_provider.broker.quota import Quota, Quotas

from .builders import NOW, TTL, claim, fleet, fleet_of, lease, node, placed, request, waiting
from .conftest import Cycle

GIB = 1024


@pytest.mark.parametrize(("size_mib", "takes"), [(80 * GIB, 100), (16 * GIB, 500), (8 * GIB, 1000)])
def test_the_same_memory_is_a_tenth_of_a_large_device_and_half_of_a_small_one(
    size_mib: int, takes: int
) -> None:
    assert request(memory_mib=8 * GIB, milli=1).milli_on(size_mib) == takes


def test_a_part_is_rounded_up_and_is_never_below_what_was_asked_at_least() -> None:
    assert request(memory_mib=10, milli=1).milli_on(30_001) == 1
    assert request(memory_mib=10_001, milli=1).milli_on(30_000) == 334
    assert request(memory_mib=10, milli=125).milli_on(30_000) == 125
    assert request(memory_mib=10, milli=1000).milli_on(30_000) == 1000


def test_as_many_share_a_device_as_its_memory_has_room_for(cycle: Cycle) -> None:
    some = fleet_of(node("big", 1, "A100"), node("small", 1, "V100"))
    wishes = [claim(f"c{number:02}", memory_mib=8 * GIB, milli=100) for number in range(13)]
    decisions = cycle(some, wishes)
    on = Counter(device for devices in placed(decisions).values() for device in devices)
    assert on == {"big/0": 10, "small/0": 2}
    assert {each.shares for each in decisions.placements if each.devices == ("big/0",)} == {(100,)}
    assert {each.shares for each in decisions.placements if each.devices == ("small/0",)} == {(500,)}
    (left,) = waiting(decisions).values()
    assert "asked 1 shared GPU with 8GiB (at least 0.1 of it)" in left.reason.text


def test_a_whole_device_goes_to_nobody_while_a_part_of_it_is_leased(cycle: Cycle) -> None:
    shared = [lease("x", "n0/0", memory_mib=8 * GIB, milli=1)]
    decisions = cycle(fleet(1, 1), [claim("whole"), claim("part", memory_mib=60 * GIB, milli=1)], shared)
    assert placed(decisions) == {"part": ["n0/0"]}


def test_memory_that_no_device_has_is_refused_with_the_largest_one() -> None:
    small = fleet_of(node("n0", 2, "K80"))
    found = reject_reason(request(memory_mib=12 * GIB, milli=125), small)
    assert found is not None
    assert "asked 1 shared GPU with 12GiB" in found.text
    assert "the largest has 11.1GiB" in found.text


def test_a_team_counts_what_its_shares_hold_and_what_the_next_may_hold_at_most() -> None:
    some = fleet_of(node("big", 1, "A100"), node("small", 1, "V100"))
    wish, fast = claim("next", memory_mib=8 * GIB, milli=1), some.nodes[0].devices[0].tflops
    held = Lease(LeaseId("l"), wish.id, (DeviceId("big/0"),), wish.request, NOW, NOW + TTL, (100,))
    share = FairShare(Quotas({"a": Quota(limit=0.3)}), some, [held])
    assert share.held(None) == 0.1
    assert share.asked(wish.request) == 0.5
    assert share.asked(replace(wish.request, models=frozenset({"A100"}))) == 0.1
    assert share.asked(replace(wish.request, min_tflops=fast, strict=True)) == 0.1
    assert share.asked(replace(wish.request, host="big")) == 0.1


def test_a_share_counts_for_limit_and_quota_by_the_devices_that_it_may_have() -> None:
    some = fleet_of(node("big", 1, "A100"), node("small", 1, "V100"))
    quotas = Quotas({"a": Quota(devices=0.2, limit=0.3)})
    large = replace(claim("large", model="A100", memory_mib=8 * GIB, milli=1), team="a")
    assert not FairShare(quotas, some).borrows(large), "a tenth of an A100 is within 0.2"
    assert placed(Engine(CyclePolicy(), some, (), [large], quotas=quotas).turn(NOW)) == {"large": ["big/0"]}


def test_a_share_that_could_only_wait_for_ever_at_its_teams_limit_is_refused_with_a_way_out() -> None:
    some = fleet_of(node("big", 1, "A100"), node("small", 1, "V100"))
    quotas = Quotas({"a": Quota(limit=0.3)})
    any_model = replace(claim("any", memory_mib=8 * GIB, milli=1), team="a")
    (found,) = Engine(CyclePolicy(), some, (), [any_model], quotas=quotas).turn(NOW).rejections
    assert "it counts as 0.5" in found.reason.text
    assert "name a model with more memory, ask for less, or raise the team's limit" in found.reason.text


requests = st.builds(
    GpuRequest,
    gpus=st.sampled_from([1, 1, 1, 2]),
    milli=st.sampled_from([1000, 1, 125, 300]),
    memory_mib=st.integers(0, 40 * GIB),
    cpu_cores=st.sampled_from([0.0, 2.0]),
    spares=st.integers(0, 1),
    max_runtime_s=st.sampled_from([None, 60.0]),
)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_leased_of_a_device_never_exceeds_it_in_parts_or_in_memory(data: st.DataObject) -> None:
    some = Fleet((node("a", 2, "A100", cpu_cores=16), node("b", models=["V100", "T4"], cpu_cores=16)))
    sizes = {str(device.id): device.memory_mib for each in some.nodes for device in each.devices}
    engine = Engine(CyclePolicy(), some)
    held: dict[ClaimId, Lease] = {}
    wishes: dict[ClaimId, GpuRequest] = {}
    for number in range(data.draw(st.integers(1, 25))):
        if held and data.draw(st.booleans()):
            engine.end(held.pop(data.draw(st.sampled_from(sorted(held)))).id)
        new = replace(claim(f"c{number}"), request=data.draw(requests))
        wishes[new.id] = new.request
        engine.submit(new)
        for placement in engine.turn(NOW).placements:
            held[placement.claim_id] = granted(placement, wishes[placement.claim_id])
            engine.granted(placement, held[placement.claim_id])
        for name, size in sizes.items():
            assert sum(part for part, _ in parts_of(name, held.values())) <= 1000
            assert sum(memory for _, memory in parts_of(name, held.values())) <= size
        engine.validate()


def granted(placement: Placement, asked: GpuRequest) -> Lease:
    devices = placement.devices + placement.spares
    lease_id = LeaseId(f"lease-{placement.claim_id}")
    return Lease(lease_id, placement.claim_id, devices, asked, NOW, NOW + TTL, placement.shares)


def parts_of(name: str, leases: Iterable[Lease]) -> list[tuple[int, int]]:
    """Return the part and the asked memory of each lease of a device."""
    return [
        (milli, each.request.memory_mib)
        for each in leases
        for device, milli in zip(each.devices, each.milli, strict=True)
        if device == name
    ]
