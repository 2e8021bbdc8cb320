"""Gangs of pods on the imitated cluster: started together, followed, adopted, ended, and classified."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from airflow_gpu_provider.exceptions import LeaseLost, WorkerGroupFailed
from airflow_gpu_provider.kubernetes.gang import Gang, Member
from airflow_gpu_provider.kubernetes.names import LEASE_LABEL
from airflow_gpu_provider.kubernetes.pod_gang import PodGang
from tests.kubernetes.builders import gpu_node
from tests.kubernetes.imitation import Fate, Imitation

Made = Callable[..., PodGang]


def gang(lease: str = "l1", *, pods: int = 2, command: tuple[str, ...] = ()) -> Gang:
    members = tuple(Member(rank, f"gpu-{rank}", {"nvidia.com/gpu": 2}) for rank in range(pods))
    return Gang(lease=lease, task="t1", image="x:1", members=members, command=command)


@pytest.fixture
def made(cluster: Imitation) -> Made:
    from kubernetes import client

    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    cluster.create(*(gpu_node(f"gpu-{number}", gpus=2, taints=[taint]) for number in range(3)))

    def make(of: Gang, start_s: float = 60.0) -> PodGang:
        api = client.ApiClient(client.Configuration(host=cluster.url))
        return PodGang(api, "default", of, override=lambda body: body, start_s=start_s)

    return make


def nothing() -> None:
    """The lease lives."""


def grace() -> float:
    return 0.2


def runs(pods: PodGang, look: Callable[[], None] = nothing) -> None:
    with pods.running(grace) as running:
        running.follow(look)


def phases(cluster: Imitation) -> list[str]:
    return [pod["status"]["phase"] for pod in cluster.all("pods")]


def test_pods_run_for_real_on_their_nodes_and_nothing_is_left(cluster: Imitation, made: Made) -> None:
    cluster.kubelet.fates["gpu-"] = Fate(runs_command=True)
    script = "import os; print(os.environ['NODE_RANK'], os.environ['WORLD_SIZE'], flush=True)"
    said: list[str] = []
    of = gang(command=(sys.executable, "-c", script))
    with made(of).running(grace) as running:
        running.follow(nothing)
        said += [running.log_tail(member) for member in of.members]
        nodes = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in cluster.all("pods")}
    assert said == ["0 4", "1 4"]
    assert nodes == {"gpu-l1-0": "gpu-0", "gpu-l1-1": "gpu-1"}
    assert cluster.all("pods") == cluster.all("services") == []


@pytest.mark.parametrize(
    ("fate", "cause"),
    [
        (Fate(runs_s=0.1, exit_code=137, reason="OOMKilled"), "out_of_memory"),
        (Fate(runs_s=0.1, evicted="The node was low on resource: memory."), "evicted"),
        (Fate(refused="UnexpectedAdmissionError"), "pod_refused"),
        (Fate(runs_s=0.1, exit_code=1), "crashed"),
        (Fate(runs_s=0.1, exit_code=139), "crashed"),
        (Fate(runs_s=0.1, exit_code=143), "killed"),
        (Fate(stuck="CreateContainerConfigError"), "pod_configuration"),
        (Fate(stuck="ImagePullBackOff"), "image"),
    ],
)
def test_a_failure_is_told_by_its_status_and_ends_all(
    cluster: Imitation, made: Made, fate: Fate, cause: str
) -> None:
    cluster.kubelet.fates["gpu-l1-1"] = fate
    with pytest.raises(WorkerGroupFailed) as failed:
        runs(made(gang(), start_s=0.5))
    assert failed.value.reason == cause
    assert list(failed.value.failures) == [1]
    assert cluster.all("pods") == cluster.all("services") == []


def test_no_room_on_the_leased_node_is_told_in_time(cluster: Imitation, made: Made) -> None:
    cluster.change("nodes", "gpu-1", lambda node: {**node, "spec": {"unschedulable": True}})
    with pytest.raises(WorkerGroupFailed, match="Unschedulable") as failed:
        runs(made(gang(), start_s=0.3))
    assert failed.value.reason == "unschedulable"


def test_a_lost_node_is_told_and_does_not_keep_the_task(cluster: Imitation, made: Made) -> None:
    def lose() -> None:
        cluster.wait_for(lambda: phases(cluster) == ["Running"] * 2, "both run")
        cluster.lose_node("gpu-1")

    losing = threading.Thread(target=lose)
    losing.start()
    with pytest.raises(WorkerGroupFailed) as failed:
        runs(made(gang()))
    losing.join()
    assert failed.value.reason == "node_lost"
    assert [pod["spec"]["nodeName"] for pod in cluster.all("pods")] == ["gpu-1"], "nobody is there to end it"


def test_a_pod_that_someone_deletes_is_told(cluster: Imitation, made: Made) -> None:
    def delete() -> None:
        cluster.wait_for(lambda: phases(cluster) == ["Running"] * 2, "both run")
        cluster.delete("pods", "gpu-l1-0", gracePeriodSeconds=0)

    deleting = threading.Thread(target=delete)
    deleting.start()
    with pytest.raises(WorkerGroupFailed) as failed:
        runs(made(gang()))
    deleting.join()
    assert failed.value.reason == "pod_deleted"


def test_the_next_try_goes_on_with_pods_that_run(cluster: Imitation, made: Made) -> None:
    first = made(gang())
    first._start()  # and then its worker is killed
    cluster.wait_for(lambda: phases(cluster) == ["Running"] * 2, "both run")
    uids = {pod["metadata"]["uid"] for pod in cluster.all("pods")}
    with made(gang()).running(grace):
        assert {pod["metadata"]["uid"] for pod in cluster.all("pods")} == uids


def test_the_next_try_completes_a_gang_that_was_half_started_and_replaces_one_that_failed(
    cluster: Imitation, made: Made
) -> None:
    cluster.api.faults.refuse("^POST .*/pods", 403, "Forbidden")
    with pytest.raises(Exception, match="Forbidden"):
        made(gang(pods=1))._start()
    with made(gang()).running(grace):
        cluster.wait_for(lambda: phases(cluster) == ["Running"] * 2, "all that were missing run")
        cluster.kubelet.fates["gpu-l1"] = Fate()
        cluster.change("pods", "gpu-l1-0", lambda pod: {**pod, "status": {"phase": "Failed"}})
        failed = {pod["metadata"]["uid"] for pod in cluster.all("pods")}
        made(gang())._start()
        assert not failed & {pod["metadata"]["uid"] for pod in cluster.all("pods")}


def test_what_the_task_left_under_another_lease_is_ended_and_other_tasks_are_let_alone(
    cluster: Imitation, made: Made
) -> None:
    made(gang("old"))._start()
    other = Gang(lease="theirs", task="t2", image="x:1", members=(Member(0, "gpu-2", {"nvidia.com/gpu": 1}),))
    made(other)._start()
    with made(gang("new")).running(grace):
        leases = {pod["metadata"]["labels"][LEASE_LABEL] for pod in cluster.all("pods")}
        assert leases == {"new", "theirs"}
    assert [service["metadata"]["name"] for service in cluster.all("services")] == ["gpu-theirs"]


def test_pods_are_deleted_while_their_images_are_pulled(cluster: Imitation, made: Made) -> None:
    cluster.kubelet.fates["gpu-"] = Fate(stuck="ContainerCreating")

    def lost() -> None:
        if cluster.all("pods"):
            raise LeaseLost("not renewed")

    with pytest.raises(LeaseLost):
        runs(made(gang()), lost)
    assert cluster.all("pods") == []


def test_an_api_server_that_is_busy_and_then_away_costs_nothing(cluster: Imitation, made: Made) -> None:
    cluster.kubelet.fates["gpu-"] = Fate(runs_s=1.0)
    cluster.api.faults.refuse("^POST .*/pods", 500, "InternalError", times=2)
    cluster.api.faults.refuse("^POST .*/services", 429, "TooManyRequests")
    seen: list[Any] = []

    def away_for_a_while() -> None:
        cluster.wait_for(lambda: phases(cluster) == ["Running"] * 2, "both run")
        cluster.stop_listening()
        cluster.wait_for(lambda: phases(cluster) == ["Succeeded"] * 2, "both end meanwhile")
        seen.append(len(cluster.all("pods")))
        cluster.listen_again()

    going = threading.Thread(target=away_for_a_while)
    going.start()
    runs(made(gang()))
    going.join()
    assert seen == [2]
    assert cluster.all("pods") == []


@pytest.mark.parametrize(("code", "cause"), [(403, "not_started"), (422, "pod_configuration")])
def test_pods_that_the_cluster_does_not_take_are_told_and_none_is_left(
    cluster: Imitation, made: Made, code: int, cause: str
) -> None:
    cluster.api.faults.refuse("^POST .*/pods", code, "Forbidden")
    with pytest.raises(WorkerGroupFailed, match="a fault of the imitation") as failed:
        runs(made(gang()))
    assert failed.value.reason == cause
    assert cluster.all("services") == []
    cluster.wait_for(lambda: cluster.all("pods") == [], "the pod that was taken is gone")


def test_a_large_gang_starts_and_ends_together(cluster: Imitation, made: Made) -> None:
    cluster.create(*(gpu_node(f"gpu-{number}", gpus=2) for number in range(3, 24)))
    cluster.kubelet.fates["gpu-"] = Fate(runs_s=0.2)
    runs(made(gang(pods=24)))
    creations = cluster.requests("POST /api/v1/namespaces/default/")
    assert len(creations) == 25, "24 pods and a service"
    assert cluster.all("pods") == cluster.all("services") == []
