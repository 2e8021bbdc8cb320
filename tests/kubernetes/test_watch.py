"""A watched collection stays what the cluster has, whatever the API server does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from airflow_gpu_provider.kubernetes.api import ClusterApi
from airflow_gpu_provider.kubernetes.watch import MAX_PAUSE_S, Watcher, WatchRefused
from tests.kubernetes.builders import gpu_node
from tests.kubernetes.imitation import Imitation


class Names:
    """The names of a collection, and how often all of it was listed."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.lists = 0

    def replace(self, objects: list[dict[str, Any]]) -> None:
        self.found.clear()
        self.lists += 1
        for each in objects:
            self.put(each)

    def put(self, each: dict[str, Any]) -> None:
        self.found[each["metadata"]["name"]] = each["metadata"]["resourceVersion"]

    def remove(self, each: dict[str, Any]) -> None:
        del self.found[each["metadata"]["name"]]


Watching = Callable[[], tuple[Watcher, Names]]


def client_of(cluster: Imitation) -> ClusterApi:
    from kubernetes import client

    return ClusterApi(client.ApiClient(client.Configuration(host=cluster.url)))


@pytest.fixture
def watching(cluster: Imitation) -> Iterator[Watching]:
    started: list[Watcher] = []

    def start() -> tuple[Watcher, Names]:
        names = Names()
        watcher = Watcher(client_of(cluster), "/api/v1/nodes", names, chance=random.Random(1), pause_s=0.02)
        watcher.start()
        started.append(watcher)
        assert watcher.listed.wait(10)
        cluster.wait_for(lambda: cluster.api.watches.open, "it watches")
        return watcher, names

    yield start
    for watcher in started:
        watcher.stop()


def test_changes_arrive_without_asking_again(cluster: Imitation, watching: Watching) -> None:
    cluster.create(gpu_node("gpu-0"))
    watcher, names = watching()
    cluster.create(gpu_node("gpu-1"))
    cluster.delete("nodes", "gpu-0")
    cluster.wait_for(lambda: list(names.found) == ["gpu-1"], "both changes")
    assert (names.lists, watcher.behind_s()) == (1, 0.0)
    assert len(cluster.requests("/api/v1/nodes")) == 2


def test_a_large_collection_is_listed_in_pages(cluster: Imitation, watching: Watching) -> None:
    cluster.create(*(gpu_node(f"gpu-{number}") for number in range(501)))
    _, names = watching()
    assert (len(names.found), names.lists) == (501, 1)
    assert len(cluster.requests("continue=")) == 1


def test_a_dropped_watch_goes_on_where_it_was(cluster: Imitation, watching: Watching) -> None:
    _, names = watching()

    def drop() -> None:
        cluster.api.faults.drops += 1

    for number in range(3):
        cluster.call(drop)
        cluster.create(gpu_node(f"gpu-{number}"))
        cluster.wait_for(lambda: len(names.found) == number + 1, "the node, after the drop")  # noqa: B023
        cluster.wait_for(lambda: cluster.api.watches.open, "it watches again")
    assert names.lists == 1


def test_a_quiet_watch_is_moved_on_by_bookmarks_and_survives_a_compaction(
    cluster: Imitation, watching: Watching
) -> None:
    watcher, names = watching()
    cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "other"}})
    version = str(cluster.api.store.version)
    cluster.wait_for(lambda: watcher.version == version, "a bookmark")

    def compact_and_drop() -> None:
        cluster.api.store.compact()
        cluster.api.faults.drops += 1

    cluster.call(compact_and_drop)
    cluster.create(gpu_node())
    cluster.wait_for(lambda: "gpu-0" in names.found, "it goes on from the bookmark")
    assert names.lists == 1


def test_a_version_that_is_too_old_lists_again(cluster: Imitation, watching: Watching) -> None:
    cluster.create(gpu_node("gpu-0"))
    _, names = watching()

    def lose() -> None:
        cluster.api.faults.drops += 1
        cluster.api.faults.refuse("watch=true", 410, "Expired")
        cluster.api.deletion.delete(cluster.resource("nodes"), ("", "gpu-0"), {})

    cluster.call(lose)
    cluster.wait_for(lambda: names.lists == 2, "the second list")
    cluster.create(gpu_node("gpu-1"))
    cluster.wait_for(lambda: list(names.found) == ["gpu-1"], "what the list and the new watch say")


def test_pages_that_expire_are_listed_from_the_beginning(cluster: Imitation) -> None:
    cluster.create(*(gpu_node(f"gpu-{number}") for number in range(501)))
    cluster.api.faults.refuse("continue=", 410, "Expired")
    names = Names()
    watcher = Watcher(client_of(cluster), "/api/v1/nodes", names, pause_s=0.02)
    watcher.start()
    try:
        assert watcher.listed.wait(10)
        assert (len(names.found), names.lists) == (501, 1)
    finally:
        watcher.stop()


def test_a_cluster_that_is_away_and_comes_back_is_caught_up_with(
    cluster: Imitation, watching: Watching
) -> None:
    watcher, names = watching()
    cluster.stop_listening()
    cluster.wait_for(lambda: watcher.behind_s(), "it knows that it is behind")
    cluster.create(gpu_node("gpu-0"))
    cluster.listen_again()
    cluster.wait_for(lambda: "gpu-0" in names.found, "what happened meanwhile")
    cluster.wait_for(lambda: watcher.behind_s() == 0.0, "it watches again")


@pytest.mark.parametrize(("code", "reason"), [(500, "InternalError"), (403, "Forbidden"), (409, "Conflict")])
def test_refusals_are_tried_again(cluster: Imitation, code: int, reason: str) -> None:
    cluster.api.faults.refuse("^GET /api/v1/nodes", code, reason, times=3)
    cluster.create(gpu_node())
    names = Names()
    watcher = Watcher(client_of(cluster), "/api/v1/nodes", names, pause_s=0.01)
    watcher.start()
    try:
        cluster.wait_for(lambda: "gpu-0" in names.found, "the list")
    finally:
        watcher.stop()


def test_pauses_grow_to_a_bound_with_chance_in_them_and_heed_the_server(cluster: Imitation) -> None:
    watcher = Watcher(client_of(cluster), "/api/v1/nodes", Names(), chance=random.Random(3))
    pauses = [watcher._failed(OSError("away")) for _ in range(20)]
    assert pauses[0] <= 0.5 and max(pauses) <= MAX_PAUSE_S
    assert min(pauses[10:]) >= MAX_PAUSE_S / 2
    assert len(set(pauses[10:])) > 5
    busy = WatchRefused(429, "busy")
    busy.headers = {"Retry-After": "30"}  # type: ignore[attr-defined]
    fresh = Watcher(client_of(cluster), "/api/v1/nodes", Names())
    assert fresh._failed(busy) == 30
