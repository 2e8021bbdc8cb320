"""What the mix of requests says about fragments and scarce kinds, before and after it has met them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_provider.broker.fragmentation import Mix
from airflow_gpu_provider.broker.layout import FloatArray, Layout
from airflow_gpu_provider.broker.model import GpuRequest

from .builders import fleet_of, node, request

LAYOUT = Layout.of(
    fleet_of(*(node(f"a{each}", 4, "A100", cpu_cores=32) for each in range(9)), node("v", 4, "V100"))
)
A100, V100 = (
    next(n for n, kind in enumerate(LAYOUT.kinds) if kind.model == name) for name in ("A100", "V100")
)

requests = st.builds(
    request,
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([None, "A100", "V100"]),
    milli=st.sampled_from([1000, 810, 470, 160]),
    cpu_cores=st.sampled_from([0.0, 3.0, 11.9]),
)
banks = st.tuples(
    st.integers(0, 1), st.integers(0, 64_000), st.lists(st.integers(0, 1000), min_size=4, max_size=4)
)


def fragments(mix: Mix, *rows: tuple[int, int, list[int]]) -> FloatArray:
    kind, cpu, milli = (np.array(each, np.int64) for each in zip(*rows, strict=True))
    return mix.fragments(kind, cpu, milli)


@given(st.lists(requests, min_size=1, max_size=6), st.lists(banks, min_size=1, max_size=6))
def test_a_bank_never_loses_more_than_is_free_nor_less_than_nothing(
    asked: list[GpuRequest], rows: list[tuple[int, int, list[int]]]
) -> None:
    lost = fragments(Mix.of(LAYOUT, asked), *rows)
    assert (lost >= -1e-6).all()
    assert (lost <= np.array([sum(milli) for _, _, milli in rows]) + 1e-6).all()


@given(st.lists(requests, min_size=1, max_size=6), banks, st.integers(0, 64_000))
def test_more_free_cores_never_make_more_fragments(
    asked: list[GpuRequest], bank: tuple[int, int, list[int]], more: int
) -> None:
    kind, cpu, milli = bank
    lost = fragments(Mix.of(LAYOUT, asked), bank, (kind, cpu + more, milli))
    assert lost[1] <= lost[0] + 1e-6


def test_devices_that_the_cores_cannot_feed_are_fragments_though_one_more_request_fits() -> None:
    mix = Mix.of(LAYOUT, [request(1, cpu_cores=8)])
    idle = [1000] * 4
    fed, half_fed, starved = fragments(mix, (A100, 32_000, idle), (A100, 16_000, idle), (A100, 7_000, idle))
    assert fed == 0
    assert 0 < half_fed < starved == 4000


def test_a_share_that_leaves_a_rest_on_each_device_makes_fragments_of_it() -> None:
    whole, rest = (
        fragments(Mix.of(LAYOUT, [request(1, milli=each)]), (A100, 0, [1000] * 4))[0] for each in (500, 470)
    )
    assert whole == 0
    assert rest > 0


def test_before_anybody_chose_the_small_kind_is_the_scarce_one() -> None:
    pressure = Mix.of(LAYOUT, [request(1)] * 20).pressure
    assert pressure[V100] > pressure[A100] == 0


def test_nothing_is_imagined_among_kinds_of_one_size() -> None:
    alike = Layout.of(fleet_of(node("a", 4, "A100"), node("v", 4, "V100")))
    assert Mix.of(alike, [request(1)]).pressure.tolist() == [0.0, 0.0]


@given(st.lists(requests.filter(lambda each: not each.models), min_size=1, max_size=6))
def test_what_was_imagined_is_forgotten_when_all_accept_every_kind(asked: list[GpuRequest]) -> None:
    young, old = (Mix.of(LAYOUT, {each: times for each in asked}).pressure for times in (20, 2000))
    assert (old <= young).all()
    assert old.max() < 0.02 < young.max()


@pytest.mark.parametrize(("cores", "by_cores"), [(1_000, False), (16_000, True)])
def test_scarcity_is_paid_for_the_larger_share_of_gpu_and_cores(cores: int, by_cores: bool) -> None:
    mix = Mix.of(LAYOUT, [request(1, "A100")] * 10)
    free, taken = [36_000, 4_000], np.array([1000, 1000], np.int64)
    paid = mix.dearness(free, taken, cores) / mix.scarcity(free)
    assert paid[A100] == (pytest.approx(cores * 4000 / 32_000) if by_cores else 1000)
