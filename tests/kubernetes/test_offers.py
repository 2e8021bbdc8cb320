"""What a node offers, by the labels and resources of NVIDIA's components and of clouds."""

from __future__ import annotations

from airflow_gpu_provider.broker.flavors import FLAVORS, is_slice
from airflow_gpu_provider.kubernetes.offers import Offer, offers_of

P = "nvidia.com/"
GPU = P + "gpu"


def offers(
    labels: dict[str, str], capacity: dict[str, str], allocatable: dict[str, str] | None = None
) -> tuple[Offer, ...]:
    return offers_of(labels, capacity, capacity if allocatable is None else allocatable)


def test_whole_gpus_are_known_by_their_labels() -> None:
    labels = {f"{GPU}.product": "NVIDIA-A100-SXM4-40GB", f"{GPU}.memory": "40960", f"{GPU}.count": "8"}
    assert offers(labels, {GPU: "8", "cpu": "64"}, {GPU: "7"}) == (Offer(GPU, 8, 7, "A100", 40_960, 35.0),)


def test_slices_of_one_kind_stand_in_place_of_the_gpus() -> None:
    labels = {
        f"{GPU}.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb",
        f"{GPU}.memory": "4864",
        f"{GPU}.count": "14",
        P + "mig.strategy": "single",
    }
    assert offers(labels, {GPU: "14"}) == (
        Offer(GPU, 14, 14, "A100-MIG-1g.5gb", 4864, 5.0, share=1 / 7, profile="1g.5gb"),
    )


def test_slices_of_several_kinds_have_resources_of_their_own() -> None:
    labels = {
        P + "mig.strategy": "mixed",
        f"{GPU}.product": "NVIDIA-A100-SXM4-80GB",
        f"{GPU}.count": "2",
        P + "mig-3g.40gb.memory": "40192",
    }
    found = offers(labels, {GPU: "1", P + "mig-3g.40gb": "2"})
    assert [(each.resource, each.slots, each.model, each.memory_mib) for each in found] == [
        (GPU, 1, "A100", 80 * 1024),
        (P + "mig-3g.40gb", 2, "A100-MIG-3g.40gb", 40_192),
    ]
    assert is_slice(found[1].model) and found[1].tflops == 15.0


def test_parts_in_time_are_a_model_of_their_own_under_either_name() -> None:
    labels = {
        f"{GPU}.product": "Tesla-T4",
        f"{GPU}.count": "2",
        f"{GPU}.replicas": "4",
        f"{GPU}.memory": "15360",
    }
    [renamed] = offers(labels, {GPU + ".shared": "8"})
    [suffixed] = offers({**labels, f"{GPU}.product": "Tesla-T4-SHARED"}, {GPU: "8"})
    for each in (renamed, suffixed):
        assert (each.slots, each.model, each.memory_mib, each.share) == (8, "T4-SHARED", 3840, 0.25)
        assert each.tflops < FLAVORS["T4"].rating / 3


def test_devices_whose_plugin_is_away_are_still_there() -> None:
    labels = {f"{GPU}.product": "NVIDIA-L4", f"{GPU}.count": "4"}
    [offer] = offers(labels, {"cpu": "8"})
    assert (offer.slots, offer.healthy, offer.memory_mib) == (4, 0, FLAVORS["L4"].memory_mib)
    [restarting] = offers(labels, {GPU: "0"}, {GPU: "0"})
    assert (restarting.slots, restarting.healthy) == (4, 0)


def test_clouds_name_the_model_where_feature_discovery_does_not_run() -> None:
    [google] = offers({"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}, {GPU: "8"})
    [karpenter] = offers({"karpenter.k8s.aws/instance-gpu-name": "a10g"}, {GPU: "1"})
    [nameless] = offers({}, {GPU: "1"})
    assert (google.model, google.memory_mib, karpenter.model) == ("H100", 81_920, "A10G")
    assert (nameless.model, nameless.memory_mib, nameless.tflops) == ("UNKNOWN-GPU", 0, 0.0)


def test_a_node_without_gpus_offers_nothing() -> None:
    assert offers({}, {"cpu": "64", "nvidia.com/gpu": "0", "example.com/fpga": "2"}) == ()
