"""Cutting into chunks keeps every product once, in order, in few and small chunks."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_provider.catalog.chunks import (
    MAX_CHUNKS,
    Chunk,
    chunk_bounds,
    effective_chunk_size,
    positive_int,
    positive_number,
    value_order,
)
from airflow_gpu_provider.exceptions import InvalidRequest


@given(products=st.integers(0, 2_000_000), asked=st.integers(1, 100_000))
def test_every_product_is_in_exactly_one_of_at_most_256_chunks(products: int, asked: int) -> None:
    size = effective_chunk_size(products, asked)
    bounds = list(chunk_bounds(products, size))
    assert len(bounds) <= MAX_CHUNKS
    assert size >= asked
    ends = [0]
    for first, count in bounds:
        assert first == ends[-1] and count >= 1
        ends.append(first + count)
    assert ends[-1] == products


@given(products=st.integers(1, 256 * 50), asked=st.integers(1, 100))
def test_the_size_is_raised_only_as_far_as_needed(products: int, asked: int) -> None:
    size = effective_chunk_size(products, asked)
    if size > asked:
        assert math.ceil(products / (size - 1)) > MAX_CHUNKS


@given(st.lists(st.floats(0, 1e12), max_size=200))
def test_the_order_is_a_permutation_by_falling_value_and_keeps_ties(values: list[float]) -> None:
    order = value_order(values)
    assert sorted(order) == list(range(len(values)))
    for before, after in itertools.pairwise(order):
        assert values[before] > values[after] or (values[before] == values[after] and before < after)


def test_a_chunk_survives_xcom_and_stays_below_a_kilobyte() -> None:
    chunk = Chunk(
        255, "/data/" + "x" * 400 + "/plan.json", 10**12, 10**6, 1.5e9, "S" * 100 + " and 999999 more"
    )
    text = json.dumps(chunk.as_xcom())
    assert len(text) < 1024
    assert Chunk.from_xcom(json.loads(text)) == chunk


@pytest.mark.parametrize("raw", ["{{ chunk }}", None, {"index": 0}, {"index": "x", "plan": "", "offset": 0}])
def test_what_is_no_chunk_is_refused_with_a_sentence(raw: object) -> None:
    with pytest.raises(InvalidRequest, match="plan returned"):
        Chunk.from_xcom(raw)


@pytest.mark.parametrize("value", [0, -1, 1.5, "two", True, "", None, "1e3", "²"])
def test_counts_that_are_no_counts_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="allowed: a whole number of 1 or more"):
        positive_int("limit", value)


def test_counts_from_templates_are_read() -> None:
    assert positive_int("limit", " 12 ") == 12


@pytest.mark.parametrize("value", [0, -2, "nan", "inf", "high", True])
def test_factors_that_are_no_factors_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="allowed: a number above 0"):
        positive_number("priority", value)
