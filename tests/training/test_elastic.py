"""Which shard is where while devices come and go."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.elastic import Calm, kept_devices, spread
from airflow_gpu_provider.training.shard_range import ShardRange, check_elastic, check_start, shard_range


@given(st.data())
def test_shards_are_spread_evenly_and_no_more_of_them_move_than_must(data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, 12))
    names = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=shards, unique=True)
    before, after = data.draw(names), data.draw(names)
    at = spread(shards, before, {})
    now = spread(shards, after, at)
    loads = Counter(now.values())
    assert set(now) == set(range(shards)) and set(loads) <= set(after)
    assert {loads[device] for device in after} <= {shards // len(after), -(-shards // len(after))}
    assert spread(shards, after, now) == now, "asked again nothing moves"
    base, odd = divmod(shards, len(after))
    held = sorted((min(Counter(at.values())[device], base + 1) for device in after), reverse=True)
    may_stay = sum(min(load, base) for load in held) + min(odd, sum(load > base for load in held))
    assert sum(now[rank] == at[rank] for rank in at) == may_stay


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 12), st.integers(0, 20))
def test_a_run_gives_back_what_others_want_but_for_its_least(
    least: int, more: int, held: int, wanted_back: int
) -> None:
    shards, devices = ShardRange(least, least + more), [str(number) for number in range(held)]
    kept = kept_devices(devices, shards, wanted_back)
    assert list(kept) == devices[: len(kept)], "the broker reckons with the last ones"
    assert len(kept) == held or len(kept) >= least
    assert len(kept) == max(min(held, least), held - wanted_back)


def test_a_run_that_had_to_give_back_soon_waits_longer_each_time_and_forgets_that_later() -> None:
    shards, calm, pauses = ShardRange(2, 4), Calm(), []
    assert calm.most(2, shards, 0.0) == 4
    now = 0.0
    for _ in range(9):
        calm = calm.took(now).gave_back(now + 1)
        assert calm.most(2, shards, now + 2) == 2, "what it has is all it asks for meanwhile"
        pauses.append(calm.until - (now + 1))
        now = calm.until
        assert calm.most(2, shards, now) == 4
    assert pauses == [15, 30, 60, 120, 240, 480, 600, 600, 600]
    calm = calm.took(now).gave_back(now + 3600)
    assert calm.until == now + 3600 + 15


@pytest.mark.parametrize("value", [(2, 4), [2, 4], "2-4", " 2 - 4 ", {"min": 2, "max": 4}])
def test_a_range_may_be_written_in_several_ways(value: object) -> None:
    assert shard_range(value) == ShardRange(2, 4)


@pytest.mark.parametrize("value", [None, 2, "2", "{{ params.n }}", {"min": 2}, (1, 2, 3)])
def test_what_is_no_range_is_left_to_others(value: object) -> None:
    assert shard_range(value) is None


@pytest.mark.parametrize("value", [(4, 2), (0, 2), (True, 2), ("a", 2), "0-3", (1, 5000)])
def test_a_range_that_cannot_be_is_refused_with_an_example(value: object) -> None:
    with pytest.raises(InvalidRequest, match=r"the least first, for example \(2, 4\)"):
        shard_range(value)


@pytest.mark.parametrize("gpus", [1, 5])
def test_a_lease_is_within_the_range(gpus: int) -> None:
    check_start(3, ShardRange(2, 4))
    with pytest.raises(InvalidRequest, match=r"set gpus .* to 2"):
        check_start(gpus, ShardRange(2, 4))


@pytest.mark.parametrize(
    ("changed", "help_"),
    [
        ({"script": "a.py"}, "shard_count=2, or use entrypoint="),
        ({"backend": "nccl"}, "'gloo'"),
        ({"is_shared": True}, "leave shared"),
    ],
)
def test_what_cannot_be_elastic_says_what_can(changed: dict[str, Any], help_: str) -> None:
    usual: dict[str, Any] = {"script": None, "backend": "auto", "is_shared": False}
    check_elastic(ShardRange(2, 4), **usual)
    with pytest.raises(InvalidRequest, match=help_):
        check_elastic(ShardRange(2, 4), **{**usual, **changed})
