"""What a pod takes of its node."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_provider.kubernetes.pods import NOTHING, Needs, pod_needs, pod_use
from tests.kubernetes import scheduler
from tests.kubernetes.builders import pod

GPU = "nvidia.com/gpu"


def container(gpus: int = 0, cpu: str = "0", *, is_sidecar: bool = False) -> dict[str, Any]:
    limits = {**({GPU: str(gpus)} if gpus else {}), "cpu": cpu}
    return {
        "name": "c",
        "resources": {"limits": limits},
        **({"restartPolicy": "Always"} if is_sidecar else {}),
    }


def test_the_largest_init_container_counts_only_if_it_needs_more() -> None:
    spec = {"containers": [container(2, "500m"), container(1, "1")], "initContainers": [container(1, "4")]}
    assert pod_needs(spec) == Needs(cpu_cores=4, gpus={GPU: 3})


def test_a_sidecar_counts_beside_the_containers_and_beside_later_init_containers() -> None:
    starts = [container(0, "8"), container(0, "1", is_sidecar=True), container(0, "7500m")]
    assert pod_needs({"containers": [container(1, "2")], "initContainers": starts}).cpu_cores == 8.5
    assert pod_needs({"containers": [container(1, "9")], "initContainers": starts}).cpu_cores == 10


def test_what_the_pod_asks_for_as_a_whole_replaces_the_sum_and_overhead_comes_on_top() -> None:
    spec = {
        "containers": [container(1, "2")],
        "resources": {"requests": {"cpu": "3", "memory": "2Gi"}},
        "overhead": {"cpu": "250m", "memory": "128Mi"},
    }
    assert pod_needs(spec) == Needs(3.25, 2176, {GPU: 1})


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 64)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 64)), max_size=4),
)
def test_the_count_agrees_with_that_of_the_imitated_scheduler(
    runs: list[tuple[int, int]], starts: list[tuple[int, int]]
) -> None:
    spec = {
        "containers": [container(gpus, str(cpu)) for gpus, cpu in runs],
        "initContainers": [container(gpus, str(cpu)) for gpus, cpu in starts],
    }
    theirs = scheduler.needs({"spec": spec})
    needs = pod_needs(spec)
    assert (needs.cpu_cores, needs.gpus.get(GPU, 0)) == (theirs["cpu"], theirs[GPU])


@pytest.mark.parametrize(
    ("phase", "counts"), [("Pending", True), ("Running", True), ("Succeeded", False), ("Failed", False)]
)
def test_a_pod_that_is_over_takes_nothing_and_one_that_is_being_deleted_does(
    phase: str, counts: bool
) -> None:
    body = pod("one", gpus=2, node="gpu-0")
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    use = pod_use({**body, "status": {"phase": phase}})
    assert (use.needs.gpus if use else {}) == ({GPU: 2} if counts else {})


def test_a_pod_without_a_node_takes_nothing() -> None:
    assert pod_use({**pod("one", gpus=2), "status": {"phase": "Pending"}}) is None
    assert NOTHING.plus(NOTHING) == NOTHING
