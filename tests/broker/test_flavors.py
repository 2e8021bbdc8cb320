from __future__ import annotations

import pytest

from airflow_gpu_provider.broker.flavors import FLAVORS, canonical_model, is_slice, tflops


@pytest.mark.parametrize(
    ("nvml_name", "model"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("a100", "A100"),
        ("rtx-4090", "RTX 4090"),
    ],
)
def test_the_name_that_nvml_gives_is_shortened(nvml_name: str, model: str) -> None:
    assert canonical_model(nvml_name) == model


@pytest.mark.parametrize(
    ("name", "kept"), [("NVIDIA A100X", "A100X"), ("NVIDIA TITAN Xp", "TITAN-XP"), ("V100M32", "V100M32")]
)
def test_a_model_that_only_begins_like_a_known_one_stays_itself(name: str, kept: str) -> None:
    assert canonical_model(name) == kept


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "A100-SXM4-80GB-MIG-1g.10gb",
        "A100 MIG 1G.10GB",
        "A100-MIG-1g.10gb",
    ],
)
def test_a_slice_is_a_model_of_its_own(name: str) -> None:
    assert canonical_model(name) == "A100-MIG-1g.10gb"
    assert is_slice(canonical_model(name)) and not is_slice(canonical_model("NVIDIA A100-SXM4-80GB"))


def test_a_short_name_is_its_own_short_name() -> None:
    assert {canonical_model(name) for name in FLAVORS} == set(FLAVORS)


def test_ratings_are_on_the_scale_of_the_requirement() -> None:
    assert (tflops("A100"), tflops("V100")) == (35, 15)
    assert tflops("NVIDIA A100-SXM4-80GB") == 35
    assert tflops("T4") < tflops("V100") < tflops("A100") < tflops("H100") < tflops("B200")
    assert tflops("who knows") == 0.0
