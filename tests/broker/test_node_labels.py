"""Claims run on nodes with their labels only, and on tainted ones only if they tolerate that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from airflow_gpu_provider.broker.admission import reject_reason
from airflow_gpu_provider.broker.cycle import decide
from airflow_gpu_provider.broker.model import Claim, CyclePolicy, Fleet, GpuRequest, Node
from airflow_gpu_provider.broker.request import build_request
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.wire import RequestBody, wrong_fields

from .builders import NOW, claim, fleet_of, node, placed, request, snapshot, waiting
from .conftest import Cycle
from .invariants import check, fits_empty
from .test_cycle_properties import claims, nodes, requests

POLICY = CyclePolicy()
HALLS = fleet_of(
    node("a", 2, labels={"zone": "1"}), node("b", 2, labels={"zone": "2", "taint": "lab, noisy"})
)


def asks(name: str, *labels: str, tolerates: tuple[str, ...] = (), gpus: int = 1) -> Claim:
    return claim(name, gpus, node_labels=frozenset(labels), tolerates=frozenset(tolerates))


def test_a_label_binds_a_claim_and_a_taint_keeps_others_off(cycle: Cycle) -> None:
    both = ("lab", "noisy")
    queue = [
        asks("one", "zone=1"),
        asks("two", "zone=2", tolerates=both),
        asks("all", tolerates=("*",), gpus=2),
    ]
    found = {name: {each[0] for each in devices} for name, devices in placed(cycle(HALLS, queue)).items()}
    assert found["one"] == {"a"} and found["two"] == {"b"}
    full = cycle(HALLS, [asks(f"c{number}", tolerates=("lab",)) for number in range(3)])
    assert {each[0] for devices in placed(full).values() for each in devices} == {"a"}, (
        "noisy is not tolerated"
    )
    assert "of 2 suitable devices" in waiting(full)["c2"].reason.text


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            asks("c", "zone=3").request,
            "with zone=3; 0 of 4 devices are on nodes that it may use",
        ),
        (
            asks("c", "zone=2").request,
            "nodes are tainted 1 x lab, 1 x noisy; leave labels out",
        ),
        (
            asks("c", gpus=3).request,
            "2 of 4 devices are on nodes that it may use",
        ),
    ],
)
def test_what_no_nodes_can_serve_by_their_labels_is_rejected_with_what_is_in_the_way(
    asked: GpuRequest, says: str
) -> None:
    reason = reject_reason(asked, HALLS)
    assert reason is not None and reason.code.value == "exceeds_labels"
    assert says in reason.text


def test_what_an_author_writes_travels_as_it_is() -> None:
    built = build_request(node_labels={"zone": "1"}, tolerates="lab")
    assert built == request(node_labels=frozenset({"zone=1"}), tolerates=frozenset({"lab"}))
    assert build_request(node_labels=["zone=1"], tolerates=["lab"]) == built
    assert RequestBody.from_request(built).to_request() == built
    for wrong in ({"node_labels": "zone"}, {"node_labels": [1]}, {"tolerates": 3}):
        with pytest.raises(InvalidRequest, match="such as"):
            build_request(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"node_labels": {"zone": "hall\n1"}}, r"'\\n' in it, which no agent says"),
        ({"node_labels": ["zone=" + "x" * 500]}, "has 500 characters, at most 250"),
        ({"node_labels": {f"label-{number}": "1" for number in range(101)}}, "101 are given, at most 100"),
        ({"node_labels": {"zone=a": "b"}}, "the name 'zone=a' has an = in it"),
        ({"node_labels": ["zone"]}, "is no NAME=VALUE"),
        ({"tolerates": ["a\tb"]}, "printable characters only"),
        ({"tolerates": "x" * 251}, "has 251 characters, at most 250"),
    ],
)
def test_an_odd_label_is_refused_when_the_dag_is_parsed_and_told_what_to_write(
    wrong: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told) as refused:
        build_request(**wrong)
    assert next(iter(wrong)) in refused.value.message


@pytest.mark.parametrize("field", ["node_labels", "tolerates"])
@pytest.mark.parametrize("odd", [["zone=a\nb"], ["zone=" + "x" * 501], ["zone=a"] * 101])
def test_an_odd_label_on_the_wire_is_refused_in_our_words(field: str, odd: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        RequestBody.model_validate({field: odd})
    said = wrong_fields(refused.value)
    assert any(part in said for part in ("at most 250", "at most 100 are allowed", "printable")), said
    assert "pattern" not in said and "Tuple" not in said


bound = st.builds(
    lambda asked, labels, tolerates: replace(asked, node_labels=labels, tolerates=tolerates),
    requests,
    st.sampled_from([frozenset(), frozenset({"x=1"}), frozenset({"x=1", "y=2"})]),
    st.sampled_from([frozenset(), frozenset({"t"}), frozenset({"*"})]),
)
labelled = st.lists(
    st.fixed_dictionaries(
        {}, optional={"x": st.sampled_from("12"), "y": st.just("2"), "taint": st.sampled_from(["t", "t,u"])}
    ),
    min_size=4,
    max_size=4,
)


def may_use(each: Node, asked: GpuRequest) -> bool:
    taints = set(each.labels.get("taint", "").split(",")) - {""}
    has = {f"{name}={value}" for name, value in each.labels.items()}
    return asked.node_labels <= has and ("*" in asked.tolerates or taints <= asked.tolerates)


@given(some=nodes(), labels=labelled, queue=claims("c", of=bound))
@settings(max_examples=150, deadline=None)
def test_labels_and_taints_hold_for_whatever_is_placed_and_decide_what_is_rejected(
    some: tuple[Node, ...], labels: list[Mapping[str, Any]], queue: list[Claim]
) -> None:
    fleet = Fleet(tuple(replace(each, labels=of) for each, of in zip(some, labels, strict=False)))
    before = snapshot(fleet, queue)
    decisions = decide(before, NOW, POLICY)
    check(before, decisions, NOW, POLICY)
    asked = {each.id: each for each in queue}
    node_of = {device.id: each for each in fleet.nodes for device in each.devices}
    for placement in decisions.placements:
        wish = asked[placement.claim_id].request
        assert all(may_use(node_of[name], wish) for name in placement.devices + placement.spares)
    for each in queue:
        usable = Fleet(tuple(one for one in fleet.nodes if may_use(one, each.request)))
        rejection = reject_reason(each.request, fleet, each.excluded)
        assert (rejection is None) == fits_empty(each.request, usable, each.excluded), rejection
