"""Nodes that hold what a claim reads are nearer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.broker.artifact_affinity import (
    AffinityPolicy,
    absent_reason,
    affinity_cost,
    artifact_name,
    holders,
    lacking,
    nearest_first,
)
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.matching import candidates
from airflow_gpu_provider.broker.model import GpuRequest, ReasonCode

from .builders import fleet, fleet_of, node, request

GPT2, WIKI = "/data/models/gpt2", "/data/datasets/wikitext"
quick = settings(max_examples=100, deadline=None)


def reads(*artifacts: str, gpus: int = 1, required: bool = False) -> GpuRequest:
    return request(gpus, artifacts=frozenset(artifacts), artifacts_required=required)


def test_a_node_costs_the_part_that_it_lacks_for_each_device_asked() -> None:
    nodes = (
        node("both", artifacts=frozenset({GPT2, WIKI})),
        node("one", artifacts=frozenset({GPT2})),
        node("none"),
    )
    wish = reads(GPT2, WIKI, gpus=4)
    assert affinity_cost(nodes, wish).tolist() == [0.0, 500.0, 1000.0]
    assert affinity_cost(nodes, wish, AffinityPolicy(weight=0.0)).tolist() == [0.0, 0.0, 0.0]


def test_a_request_without_artifacts_is_at_home_everywhere() -> None:
    assert affinity_cost((node("a"), node("b")), request()).tolist() == [0.0, 0.0]
    assert holders((node("a"),), reads(required=True)) is None


def test_only_holders_of_all_serve_a_request_that_requires_them() -> None:
    some = fleet_of(
        node("a", artifacts=frozenset({GPT2})), node("b", artifacts=frozenset({GPT2 + "/", WIKI, "other"}))
    )
    layout = Layout.of(some)
    wish = reads(GPT2, WIKI, required=True)
    allowed = holders(layout.nodes, wish)
    assert allowed is not None and allowed.tolist() == [False, True]
    found = candidates(layout, wish, nodes=allowed).devices
    assert found.any(axis=1).tolist() == [False, True]
    assert absent_reason(wish, some) is None


def test_nodes_that_hold_more_are_looked_at_first() -> None:
    nodes = (
        node("one", artifacts=frozenset({WIKI})),
        node("none"),
        node("both", artifacts=frozenset({GPT2, WIKI})),
    )
    told = [each.tolist() for each in nearest_first(nodes, reads(GPT2, WIKI))]
    assert told == [[False, False, True], [True, False, True], [True, True, True]]
    assert [each.tolist() for each in nearest_first(nodes, reads(GPT2, required=True))] == [
        [False, False, True]
    ]
    assert [each.tolist() for each in nearest_first(nodes, request())] == [[True, True, True]]


def test_what_is_required_and_nowhere_makes_the_claim_wait_and_says_what_to_bring() -> None:
    reason = absent_reason(
        reads(GPT2, WIKI, required=True), fleet_of(node("a", artifacts=frozenset({GPT2})), node("b"))
    )
    assert reason is not None
    assert reason.code is ReasonCode.ARTIFACTS_ABSENT
    assert reason.text == (
        "asked 1 GPU where all its 2 artifact(s) are; none of 2 nodes holds them "
        f"({WIKI} is on 0, {GPT2} is on 1); bring them to a node, or do not require them"
    )
    assert absent_reason(reads(GPT2), fleet(2)) is None, "preferred is not required"


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
def test_holding_more_never_costs_more(
    wanted: frozenset[str], held: frozenset[str], more: frozenset[str]
) -> None:
    nodes = (node("a", artifacts=held), node("b", artifacts=held | more))
    cost = affinity_cost(nodes, request(artifacts=wanted))
    assert cost[1] <= cost[0]
    assert np.all(
        (lacking(nodes, request(artifacts=wanted)) == 0) == [wanted <= each.artifacts for each in nodes]
    )
