"""Nodes that hold what a claim reads are nearer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.broker.artifact_affinity import Nearness, absent_reason, lacking
from airflow_gpu_provider.broker.artifact_names import artifact_name
from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import (
    Claim,
    ClaimId,
    CyclePolicy,
    GpuRequest,
    Lease,
    Node,
    ReasonCode,
)

from .builders import NOW, fleet_of, lease, node, request

GPT2, WIKI = "/data/models/gpt2", "/data/datasets/wikitext"
quick = settings(max_examples=100, deadline=None)


def reads(*artifacts: str, gpus: int = 1, required: bool = False) -> GpuRequest:
    return request(gpus, artifacts=frozenset(artifacts), artifacts_required=required)


def holding(name: str, *artifacts: str, gpus: int = 4, model: str = "A100", **more: Any) -> Node:
    return node(name, gpus, model, artifacts=frozenset(artifacts), **more)


def levels(nodes: tuple[Node, ...], request: GpuRequest) -> list[tuple[float, list[bool] | None]]:
    found = Nearness(nodes).levels(request)
    return [(each.lack, None if each.nodes is None else each.nodes.tolist()) for each in found]


def on(*nodes: Node, asked: GpuRequest, leases: Iterable[Lease] = ()) -> set[str]:
    """Return the nodes on which a claim is placed; none = it waits."""
    engine = Engine(CyclePolicy(), fleet_of(*nodes), leases)
    engine.submit(Claim(ClaimId("c"), asked, NOW))
    placements = engine.turn(NOW).placements
    return {device.split("/")[0] for each in placements for device in each.devices}


# -- which nodes are looked at


def test_nodes_that_hold_more_are_looked_at_first() -> None:
    nodes = (holding("one", WIKI), holding("none"), holding("both", GPT2, WIKI))
    told = levels(nodes, reads(GPT2, WIKI))
    assert told == [(0.0, [False, False, True]), (0.5, [True, False, True]), (1.0, None)]
    assert levels(nodes, reads("/nowhere")) == [(1.0, None)]
    assert levels((), reads(GPT2)) == [(0.0, None)]


def test_only_holders_of_all_serve_a_request_that_requires_them() -> None:
    nodes = (holding("a", GPT2), holding("b", GPT2, WIKI, "other"))
    allowed = Nearness(nodes).holders(reads(GPT2, WIKI, required=True))
    assert allowed is not None and allowed.tolist() == [False, True]
    nowhere = Nearness(nodes).holders(reads("/nowhere", required=True))
    assert nowhere is not None and not nowhere.any()
    assert Nearness(nodes).holders(reads(GPT2)) is None, "preferred is not required"
    assert Nearness(nodes).holders(reads(required=True)) is None


# -- where claims go


def test_a_claim_goes_where_its_model_is() -> None:
    some = (holding("a"), holding("b", GPT2), holding("c", WIKI))
    assert on(*some, asked=reads(GPT2)) == {"b"}
    assert on(*some, asked=reads(WIKI, required=True)) == {"c"}
    assert on(*some, asked=reads(GPT2, WIKI, required=True)) == set()


def test_a_node_without_it_is_better_than_waiting_unless_it_is_required() -> None:
    some = (holding("a"), holding("b", GPT2, gpus=1))
    busy = [lease("busy", "b/0")]
    assert on(*some, asked=reads(GPT2), leases=busy) == {"a"}
    assert on(*some, asked=reads(GPT2, required=True), leases=busy) == set()
    assert on(*some, asked=reads(GPT2, gpus=2)) == {"a"}, "a gang stays together"


def test_what_is_near_is_not_worth_a_much_slower_device() -> None:
    near = {"A30": holding("b", GPT2, model="A30"), "V100": holding("b", GPT2, model="V100")}
    wish = replace(reads(GPT2), min_tflops=20.0)
    assert on(holding("a"), near["A30"], asked=wish) == {"b"}, "18.5 of 20 TFLOPS"
    assert on(holding("a"), near["V100"], asked=wish) == {"b"}, "15 of 20, as bad as lacking all"
    assert on(holding("a"), near["V100"], asked=replace(wish, min_tflops=35.0)) == {"a"}, "15 of 35"


def test_a_gang_of_one_speed_stays_one_where_its_artifacts_are() -> None:
    some = (
        holding("a", GPT2, gpus=1, host="h"),
        holding("b", GPT2, gpus=1, model="V100", host="h"),
        holding("c", gpus=2, host="h"),
    )
    assert "b" not in on(*some, asked=reads(GPT2, gpus=2))


def test_a_gang_over_nodes_goes_where_only_one_of_its_speeds_has_its_artifacts() -> None:
    fast = [holding(name, GPT2, gpus=1, host="h") for name in ("a", "b")]
    assert on(*fast, holding("c", gpus=2, model="V100"), asked=reads(GPT2, gpus=2)) == {"a", "b"}


# -- who waits, and until when


def test_what_was_brought_lets_the_claim_that_waited_for_it_start() -> None:
    before = fleet_of(holding("a"), holding("b"))
    engine = Engine(CyclePolicy(), before, claims=[Claim(ClaimId("c"), reads(GPT2, required=True), NOW)])
    assert engine.turn(NOW).placements == ()
    (waits,) = engine.waiting(NOW)
    assert waits.reason.code is ReasonCode.ARTIFACTS_ABSENT and waits.starts_in_s is None
    engine.set_fleet(fleet_of(holding("a"), holding("b", GPT2)), NOW)
    (placement,) = engine.turn(NOW).placements
    assert placement.devices == ("b/0",)


def test_what_was_removed_is_no_longer_counted_on() -> None:
    engine = Engine(CyclePolicy(), fleet_of(holding("a", GPT2), holding("b")))
    engine.submit(Claim(ClaimId("one"), reads(GPT2, required=True), NOW))
    assert len(engine.turn(NOW).placements) == 1
    engine.set_fleet(fleet_of(holding("a"), holding("b")), NOW)
    engine.submit(Claim(ClaimId("two"), reads(GPT2, required=True), NOW))
    assert engine.turn(NOW).placements == ()


def test_what_is_required_and_nowhere_says_what_to_bring() -> None:
    reason = absent_reason(reads(GPT2, WIKI, required=True), (holding("a", GPT2), holding("b")), 0)
    assert reason is not None
    assert reason.code is ReasonCode.ARTIFACTS_ABSENT
    assert reason.text == (
        "asked 1 GPU where all its 2 artifact(s) are; none of 2 nodes holds them "
        f"({WIKI} is on 0, {GPT2} is on 1); bring them to a node, or do not require them"
    )
    assert absent_reason(reads(GPT2), (), 0) is None, "preferred is not required"


def test_what_is_only_on_nodes_that_are_too_small_says_so() -> None:
    asked = Claim(ClaimId("c"), reads(GPT2, gpus=4, required=True), NOW)
    engine = Engine(CyclePolicy(), fleet_of(holding("a", GPT2, gpus=2), holding("b")), claims=[asked])
    decided = engine.turn(NOW)
    assert (decided.placements, decided.rejections) == ((), ()), "they can be brought to b"
    (waits,) = engine.waiting(NOW)
    assert "the 1 of 2 nodes that hold them have 2 suitable device(s)" in waits.reason.text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("/data//models/gpt2/", GPT2),
        ("/data/./models/gpt2", GPT2),
        ("sha256:ab//", "sha256:ab//"),
        (WIKI, WIKI),
    ],
)
def test_a_path_is_written_one_way_and_a_digest_as_it_is(text: str, name: str) -> None:
    assert artifact_name(text) == name


names = st.frozensets(st.sampled_from(["/a", "/b", "/c", "sha256:d"]), max_size=4)


@given(wanted=names, held=names, more=names)
@quick
def test_holding_more_is_never_farther_away(
    wanted: frozenset[str], held: frozenset[str], more: frozenset[str]
) -> None:
    nodes = (node("a", artifacts=held), node("b", artifacts=held | more))
    lacks = lacking(nodes, request(artifacts=wanted))
    assert lacks[1] <= lacks[0]
    assert [each == 0 for each in lacks] == [wanted <= each.artifacts for each in nodes]
