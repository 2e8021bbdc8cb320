"""The imitated API server, as the official client sees it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.kubernetes.builders import gpu_node, pod
from tests.kubernetes.imitation import Imitation, running
from tests.kubernetes.selectors import matcher


@pytest.mark.parametrize("version", ["1.30", "1.34", "1.37"])
def test_a_misspelt_field_is_refused_by_the_schema_of_each_version(version: str) -> None:
    from kubernetes import client

    with running(schemas=version) as cluster, client.ApiClient(client.Configuration(host=cluster.url)) as api:
        core = client.CoreV1Api(api)
        core.create_namespaced_pod("default", pod("fine"))
        wrong = pod("wrong", nodeSelectr={"a": "b"})
        with pytest.raises(client.ApiException, match="nodeSelectr") as refused:
            core.create_namespaced_pod("default", wrong)
        assert refused.value.status == 400
        assert client.VersionApi(api).get_code().minor == version.split(".")[1]


def test_a_write_on_an_old_version_conflicts_and_changes_nothing(core: Any) -> None:
    from kubernetes.client import ApiException

    made = core.create_namespaced_config_map("default", {"metadata": {"name": "plan"}, "data": {"step": "1"}})
    core.patch_namespaced_config_map("plan", "default", {"data": {"step": "2"}})
    made.data = {"step": "3"}
    with pytest.raises(ApiException) as refused:
        core.replace_namespaced_config_map("plan", "default", made)
    assert refused.value.status == 409
    assert core.read_namespaced_config_map("plan", "default").data == {"step": "2"}
    with pytest.raises(ApiException) as twice:
        core.create_namespaced_config_map("default", {"metadata": {"name": "plan"}})
    assert twice.value.status == 409


def test_pages_of_a_list_are_of_one_moment(core: Any, cluster: Imitation) -> None:
    cluster.create(*(gpu_node(f"gpu-{number}") for number in range(5)))
    first = core.list_node(limit=2)
    cluster.delete("nodes", "gpu-3")
    second = core.list_node(limit=2, _continue=first.metadata._continue)
    third = core.list_node(limit=2, _continue=second.metadata._continue)
    names = [node.metadata.name for page in (first, second, third) for node in page.items]
    assert names == [f"gpu-{number}" for number in range(5)]
    assert (first.metadata.remaining_item_count, third.metadata._continue) == (3, None)
    assert len({page.metadata.resource_version for page in (first, second, third)}) == 1
    assert len(core.list_node().items) == 4


@pytest.mark.parametrize(
    ("labels", "selected"),
    [
        ("app=a", ["one"]),
        ("app!=a", ["three", "two"]),
        ("app in (a, b)", ["one", "two"]),
        ("app notin (a),rank", ["two"]),
        ("!rank", ["one", "three"]),
    ],
)
def test_label_selectors_select_as_documented(labels: str, selected: list[str]) -> None:
    objects = {"one": {"app": "a"}, "two": {"app": "b", "rank": "1"}, "three": {}}
    matches = matcher("Pod", labels, "")
    found = [name for name, has in objects.items() if matches({"metadata": {"name": name, "labels": has}})]
    assert sorted(found) == selected


def test_a_field_that_pods_cannot_be_selected_by_is_refused(core: Any) -> None:
    from kubernetes.client import ApiException

    assert core.list_pod_for_all_namespaces(field_selector="spec.nodeName=gpu-0").items == []
    with pytest.raises(ApiException, match="field label not supported"):
        core.list_pod_for_all_namespaces(field_selector="spec.hostname=gpu-0")


def test_all_that_belongs_to_a_pod_goes_with_it(core: Any, cluster: Imitation) -> None:
    [owner] = cluster.create(pod("supervisor"))
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "run", "ownerReferences": pod("x", owner=owner)["metadata"]["ownerReferences"]},
        "spec": {"clusterIP": "None", "ports": [{"port": 1}]},
    }
    cluster.create(pod("shard-0", owner=owner), service, pod("stranger"))
    core.delete_namespaced_pod("supervisor", "default")
    assert [each.metadata.name for each in core.list_namespaced_pod("default").items] == ["stranger"]
    assert core.list_namespaced_service("default").items == []


def test_an_owner_deleted_in_the_foreground_outlives_what_belongs_to_it(
    cluster: Imitation, core: Any
) -> None:
    [owner] = cluster.create(pod("supervisor"))
    cluster.create(pod("shard-0", owner=owner, finalizers=["example.org/held"]))
    cluster.delete("pods", "supervisor", propagationPolicy="Foreground")
    assert [each["metadata"]["name"] for each in cluster.all("pods")] == ["supervisor", "shard-0"]
    core.patch_namespaced_pod("shard-0", "default", [{"op": "remove", "path": "/metadata/finalizers"}])
    assert cluster.all("pods") == []


def test_a_finalizer_holds_an_object_until_it_is_taken_off(core: Any) -> None:
    core.create_namespaced_pod("default", pod("held", finalizers=["kueue.x-k8s.io/managed"]))
    core.delete_namespaced_pod("held", "default")
    assert core.read_namespaced_pod("held", "default").metadata.deletion_timestamp is not None
    core.patch_namespaced_pod("held", "default", [{"op": "remove", "path": "/metadata/finalizers"}])
    assert core.list_namespaced_pod("default").items == []


def test_the_wrong_uid_deletes_nothing(core: Any) -> None:
    from kubernetes.client import ApiException

    core.create_namespaced_pod("default", pod("again"))
    with pytest.raises(ApiException) as refused:
        core.delete_namespaced_pod("again", "default", body={"preconditions": {"uid": "that of another"}})
    assert refused.value.status == 409
    assert core.read_namespaced_pod("again", "default").metadata.deletion_timestamp is None


def test_patches_join_lists_by_key_only_where_they_are_strategic(core: Any) -> None:
    core.create_namespaced_pod("default", pod("one"))
    more = {"spec": {"containers": [{"name": "main", "image": "other:2"}]}}
    joined = core.patch_namespaced_pod(
        "one", "default", more, _content_type="application/strategic-merge-patch+json"
    )
    assert (joined.spec.containers[0].image, joined.spec.containers[0].image_pull_policy) == (
        "other:2",
        "IfNotPresent",
    )
    replaced = core.patch_namespaced_pod("one", "default", more, _content_type="application/merge-patch+json")
    assert replaced.spec.containers[0].image_pull_policy is None


def test_a_status_is_written_apart_from_the_rest(core: Any, cluster: Imitation) -> None:
    cluster.create(gpu_node())
    core.patch_node("gpu-0", {"metadata": {"labels": {"a": "b"}}, "status": {"capacity": {"cpu": "1"}}})
    core.patch_node_status("gpu-0", {"metadata": {"labels": {"a": "c"}}, "status": {"phase": "Running"}})
    node = core.read_node("gpu-0")
    assert (node.metadata.labels["a"], node.status.capacity["cpu"], node.status.phase) == (
        "b",
        "64",
        "Running",
    )


def test_refusals_carry_the_code_and_when_to_come_again(core: Any, cluster: Imitation) -> None:
    cluster.api.faults.refuse("^GET /api/v1/nodes", 429, "TooManyRequests", retry_after_s=1)
    refused = httpx.get(f"{cluster.url}/api/v1/nodes")
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert refused.json()["reason"] == "TooManyRequests"
    assert core.list_node().items == []
