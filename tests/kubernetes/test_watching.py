"""Watches of the imitated API server, by the official client."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.kubernetes.builders import gpu_node, pod
from tests.kubernetes.imitation import Imitation


def watched(function: Any, count: int, **query: Any) -> list[tuple[str, str]]:
    """Return the next ``count`` events: type and name."""
    from kubernetes.watch import Watch

    events = []
    for event in Watch().stream(function, timeout_seconds=10, **query):
        events.append((event["type"], event["raw_object"]["metadata"].get("name")))
        if len(events) == count:
            break
    return events


def test_a_watch_from_a_version_misses_nothing_and_repeats_nothing(core: Any, cluster: Imitation) -> None:
    cluster.create(gpu_node("gpu-0"))
    version = core.list_node().metadata.resource_version
    cluster.create(gpu_node("gpu-1"))
    cluster.delete("nodes", "gpu-0")
    assert watched(core.list_node, 2, resource_version=version) == [("ADDED", "gpu-1"), ("DELETED", "gpu-0")]


def test_a_pod_that_leaves_a_selector_is_deleted_for_its_watch(core: Any, cluster: Imitation) -> None:
    cluster.create(gpu_node("gpu-0"), pod("ends", gpus=1))
    cluster.wait_for(lambda: (cluster.pod("ends") or {})["status"]["phase"] == "Running", "it runs")
    version = core.list_namespaced_pod("default").metadata.resource_version
    cluster.change("pods", "ends", lambda each: {**each, "status": {**each["status"], "phase": "Succeeded"}})
    events = watched(
        core.list_pod_for_all_namespaces,
        1,
        resource_version=version,
        field_selector="status.phase!=Succeeded",
    )
    assert events == [("DELETED", "ends")]


def test_a_version_older_than_the_history_is_gone(core: Any, cluster: Imitation) -> None:
    from kubernetes.client import ApiException

    version = core.list_node().metadata.resource_version
    cluster.create(gpu_node())
    cluster.call(cluster.api.store.compact)
    with pytest.raises(ApiException) as gone:
        watched(core.list_node, 1, resource_version=version)
    assert gone.value.status == 410


def test_bookmarks_move_a_quiet_watch_on(core: Any, cluster: Imitation) -> None:
    version = core.list_node().metadata.resource_version
    cluster.create(pod("elsewhere"))
    events = watched(core.list_node, 1, resource_version=version, allow_watch_bookmarks=True)
    assert events == [("BOOKMARK", None)]


def test_a_dropped_watch_ends_in_the_middle_of_a_line(core: Any, cluster: Imitation) -> None:
    from urllib3.exceptions import ProtocolError

    def drop() -> None:
        cluster.api.faults.drops += 1

    def drop_when_open() -> None:
        cluster.wait_for(lambda: cluster.api.watches.open, "a watch is open")
        cluster.call(drop)
        cluster.create(gpu_node())

    dropping = threading.Thread(target=drop_when_open)
    dropping.start()
    with pytest.raises(ProtocolError):
        watched(core.list_node, 5)
    dropping.join()
