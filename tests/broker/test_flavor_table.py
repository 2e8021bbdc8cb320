"""GPU models that people make known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_gpu_provider.broker.flavor_table import EXAMPLE, extended, parse_flavors, rated
from airflow_gpu_provider.broker.flavors import FLAVORS, tflops
from airflow_gpu_provider.exceptions import InvalidRequest


def table(**entries: Any) -> Any:
    return parse_flavors(json.dumps({name.replace("_", " "): entry for name, entry in entries.items()}))


def test_a_model_is_rated_by_its_speeds_as_the_built_in_ones_are() -> None:
    h100 = table(NVIDIA_Twin={"memory": "80GiB", "tflops": {"fp32": 67, "fp16": 989, "fp64": 34}})["TWIN"]
    assert (h100.rating, h100.memory_mib) == (FLAVORS["H100"].rating, 81_920)
    assert h100.tflops == {"fp32": 67, "fp16": 989, "fp64": 34}
    old = table(Old={"memory": "8GiB", "tflops": {"fp32": 5.5}})["OLD"]
    assert old.rating == FLAVORS["P4"].rating == 5.5


def test_a_rating_that_is_given_counts_and_the_rest_of_a_known_model_stays() -> None:
    own = table(NVIDIA_A100={"rating": 40}, V100={"memory": "32GiB"}, Q1={"memory": "1GiB", "rating": 3})
    assert (own["A100"].rating, own["A100"].memory_mib) == (40, 81_920)
    assert own["A100"].tflops == FLAVORS["A100"].tflops
    assert (own["V100"].rating, own["V100"].memory_mib) == (15, 32_768)
    whole = extended(own)
    assert [tflops(model, whole) for model in ("A100", "V100", "Q1", "H100")] == [40, 15, 3, tflops("H100")]
    assert tflops("A100") == 35, "the shared table stays as it is"


def test_the_example_of_the_error_is_none() -> None:
    assert list(parse_flavors(EXAMPLE)) == ["RTX-PRO-5000"]
    assert parse_flavors("") == parse_flavors("  ") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"no JSON \(Expecting property name.*character 2\)"),
        ("[]", "must be an object, a model for each name"),
        ('{"": {"rating": 1}}', "a model has no name"),
        ('{"Q1": 5}', "'Q1' must be an object"),
        ('{"Q1": {"memory": "1GiB", "flops": 5}}', "'Q1' has flops; known are memory, tflops, rating"),
        ('{"Q1": {"memory": "1GiB"}}', r"'Q1' needs tflops of fp16 or fp32, or a rating \(A100 = 35"),
        ('{"Q1": {"rating": 5}}', "'Q1' needs its memory"),
        ('{"Q1": {"memory": 8, "rating": 5}}', "memory of 'Q1': 8 is no size of memory"),
        ('{"Q1": {"memory": "1GiB", "tflops": 5}}', "tflops of 'Q1' must be an object by precision"),
        ('{"Q1": {"memory": "1GiB", "tflops": {"fp12": 5}}}', "fp12; known are fp64, fp32"),
        ('{"Q1": {"memory": "1GiB", "tflops": {"fp16": "5"}}}', "fp16 of 'Q1' is '5'; it must be a number"),
        ('{"Q1": {"memory": "1GiB", "rating": 0}}', "the rating of 'Q1' is 0; it must be a number above 0"),
        ('{"Q1": {"memory": "1GiB", "rating": true}}', "the rating of 'Q1' is True"),
    ],
)
def test_what_is_wrong_is_named_with_an_example(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as error:
        parse_flavors(text)
    assert EXAMPLE in error.value.message


def test_a_reported_device_is_rated_by_own_entries_and_a_slice_by_its_part() -> None:
    own = table(A100={"rating": 40}, Q1={"memory": "1GiB", "rating": 7})
    assert rated("A100", 35.0, 1.0, own) == 40
    assert rated("Q1", 0.0, 1.0, own) == 7
    assert rated("Q1-MIG-1g.10gb", 0.0, 1 / 7, own) == pytest.approx(1)
    assert rated("V100", 15.0, 1.0, own) == 15
