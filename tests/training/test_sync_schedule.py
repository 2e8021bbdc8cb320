"""When shards share: agreed at synchronisations, repeatable from the record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.network_options import NetworkOptions, network_options
from airflow_gpu_provider.training.sync_schedule import Pace, SyncSchedule


def syncs(schedule: SyncSchedule, count: int, wanted: dict[int, int]) -> list[int]:
    """Return the steps at which a run shares, the supervisor wanting intervals from some steps on."""
    version, found, want = 0, [], 0
    for done in range(1, count + 1):
        want = wanted.get(done, want)
        if schedule.is_due(done, version) or done == count:
            schedule.agree(done, schedule.proposal(done, want, version))
            version = done
            found.append(done)
    return found


@given(st.integers(1, 12), st.dictionaries(st.integers(1, 200), st.integers(1, 5)), st.integers(1, 200))
def test_a_run_is_repeated_from_its_schedule_and_resumed_anywhere(
    base: int, factors: dict[int, int], count: int
) -> None:
    schedule = SyncSchedule(base)
    found = syncs(schedule, count, {step: base * factor for step, factor in factors.items()})
    assert syncs(SyncSchedule(base, schedule.entries), count, {7: base * 5}) == found
    for at, version in enumerate(found[:-1]):
        resumed = SyncSchedule(base)
        resumed.take([entry for entry in schedule.entries if entry[0] <= version])
        rest = next(
            done for done in range(version + 1, count + 1) if resumed.is_due(done, version) or done == count
        )
        assert rest == found[at + 1]


def test_the_change_begins_at_a_synchronisation_and_is_undone_by_a_roll_back() -> None:
    schedule = SyncSchedule(10)
    assert syncs(schedule, 100, {15: 40, 65: 10}) == [10, 20, 60, 100]
    assert schedule.entries == [(20, 40), (100, 10)]
    schedule.agree(60, 20)
    assert schedule.entries == [(20, 40), (60, 20)]


def test_a_run_that_was_resumed_in_the_middle_of_an_interval_shares_at_the_usual_steps() -> None:
    assert SyncSchedule(10).is_due(30, 25) and not SyncSchedule(10).is_due(35, 25)


def looked(pace: Pace, *latencies: float | None) -> list[int]:
    found = []
    for latency in latencies:
        pace.look(latency)
        found.append(pace.interval)
    return found


def test_the_interval_grows_with_the_latency_within_bounds_and_shrinks_late() -> None:
    pace = Pace(10, threshold_ms=5.0, longest=40)
    assert looked(pace, *[9.0] * 4) == [10, 10, 10, 20]
    assert looked(pace, *[100.0] * 4)[-1] == 40, "never above the longest"
    assert looked(pace, *[1.0] * 10) == [40] * 9 + [10]


def test_a_latency_that_comes_and_goes_changes_nothing() -> None:
    pace = Pace(10, threshold_ms=5.0, longest=40)
    assert set(looked(pace, *[50.0, 50.0, 50.0, 1.0, None] * 5)) == {10}
    pace.resume(20)
    assert set(looked(pace, *[4.5] * 30)) == {20}, "just below the threshold is no reason to go back"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"interfaces": []}, "ip link"),
        ({"interfaces": ["eth0,eth1"]}, "ip link"),
        ({"latency_threshold_ms": -1}, "latency_threshold_ms"),
        ({"threshold": 1}, "latency_threshold_ms, sync_interval_max"),
        ({"sync_schedule": [(20, 10), (10, 20)]}, "grow"),
    ],
)
def test_wrong_options_say_what_is_possible(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        network_options(wrong)


def test_one_interface_may_be_named_alone() -> None:
    assert network_options({"interfaces": "eth1"}) == NetworkOptions(interfaces=("eth1",))
    assert network_options(None).longest(25) == 100
