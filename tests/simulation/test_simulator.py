"""The simulator on cases small enough to work out by hand, and what must hold in any."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.broker.model import DeviceId, Fleet, Placement
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.simulation.policies import POLICIES, Ours
from airflow_gpu_provider.simulation.simulator import End, Run, simulate
from airflow_gpu_provider.simulation.task import Running, Task
from tests.simulation.simulated import by_name, fleet, run, task

ONE = fleet({"a": ("A100", 1)})
TWO_MODELS = fleet({"a": ("A100", 2), "v": ("V100", 2)})


HALLS = Fleet(
    tuple(
        replace(each, labels=labels)
        for each, labels in zip(
            fleet({"a": ("A100", 2), "b": ("A100", 2), "v": ("V100", 1)}).nodes,
            ({"zone": "1"}, {"zone": "2"}, {"taint": "lab"}),
            strict=True,
        )
    )
)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_devices_of_nodes_with_the_labels_and_without_taints(policy: str) -> None:
    hall = frozenset({"zone=2"})
    tasks = [task(f"l{number}", 0, 100, node_labels=hall) for number in range(3)]
    tasks += [task(f"t{number}", 0, 100) for number in range(3)]
    result = by_name(run(policy, HALLS, tasks))
    for name, outcome in result.items():
        nodes = {device.split("/")[0] for device in outcome.devices}
        assert nodes == {"b"} if name.startswith("l") else nodes <= {"a", "b"}, (name, nodes)


def busy_tasks(seed: int, number: int = 60) -> list[Task]:
    """Return tasks that crowd `TWO_MODELS`: gangs, promises, timeouts, some for one model only."""
    chance = random.Random(seed)
    return [
        task(
            f"t{index:02d}",
            chance.uniform(0, 2000),
            {"A100": (seconds := chance.uniform(10, 400)), "V100": 2 * seconds},
            chance.choice((1, 1, 1, 2)),
            models=frozenset(chance.choice(((), (), ("A100",), ("V100",)))),
            max_runtime_s=chance.choice((None, 900.0)),
            value=chance.choice((0.0, 10.0)),
            dag_id=chance.choice(("x", "y")),
            queue_timeout_s=chance.choice((None, None, 300.0)),
        )
        for index in range(number)
    ]


def check_conservation(result: Run, tasks: list[Task]) -> None:
    """Every task ends once; no device serves two at a time; a gang has all of its devices all the time."""
    assert Counter(o.task.id for o in result.outcomes) == Counter(t.id for t in tasks)
    spans: dict[DeviceId, list[tuple[float, float]]] = {}
    for outcome in result.outcomes:
        if outcome.end is not End.FINISHED:
            assert not outcome.devices and outcome.started_s is None
            continue
        assert outcome.started_s is not None and outcome.started_s >= outcome.task.arrives_s
        assert len(set(outcome.devices)) == len(outcome.devices) == outcome.task.request.gpus
        models = {"A100" if device.startswith("a/") else "V100" for device in outcome.devices}
        assert models <= (outcome.task.request.models or {"A100", "V100"})
        took = outcome.ended_s - outcome.started_s
        assert took == pytest.approx(outcome.task.runtime_on(models))
        for device in outcome.devices:
            spans.setdefault(device, []).append((outcome.started_s, outcome.ended_s))
    for of_device in spans.values():
        of_device.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(of_device))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_every_task_ends_once_and_no_device_serves_two(policy: str, seed: int) -> None:
    tasks = busy_tasks(seed)
    check_conservation(run(policy, TWO_MODELS, tasks), tasks)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_tasks_give_the_same_run(policy: str) -> None:
    tasks = busy_tasks(7)
    shuffled = random.Random(1).sample(tasks, len(tasks))
    assert run(policy, TWO_MODELS, tasks) == run(policy, TWO_MODELS, shuffled)


@pytest.mark.parametrize("policy", POLICIES)
def test_tasks_on_one_device_run_one_after_the_other(policy: str) -> None:
    found = by_name(run(policy, ONE, [task("first", 0, 100), task("second", 10, 50), task("third", 400, 5)]))
    assert [(found[name].started_s, found[name].ended_s) for name in ("first", "second", "third")] == [
        (0, 100),
        (100, 150),
        (400, 405),
    ]
    assert found["second"].waited_s == 90


def test_strict_arrival_keeps_a_small_task_behind_a_gang_and_pools_let_it_pass() -> None:
    on = fleet({"a": ("A100", 2)})
    tasks = [task("long", 0, 100), task("gang", 1, 10, gpus=2), task("small", 2, 10)]
    assert by_name(run("fifo", on, tasks))["small"].started_s == 110
    assert by_name(run("pools", on, tasks))["small"].started_s == 2


def test_ours_lets_a_task_pass_a_gang_only_if_it_promises_to_end_in_time() -> None:
    on = fleet({"a": ("A100", 2)})
    long = task("long", 0, 100, max_runtime_s=100.0)
    gang = replace(task("gang", 1, 10, gpus=2), value=99)
    quick, vague = task("quick", 2, 10, max_runtime_s=20.0), task("vague", 2, 10)
    found = by_name(run("ours", on, [long, gang, quick, vague]))
    assert (found["quick"].started_s, found["gang"].started_s, found["vague"].started_s) == (2, 100, 110)


def test_a_pool_keeps_its_tasks_while_another_pool_is_idle() -> None:
    on = fleet({"a": ("A100", 1), "v": ("V100", 1)})
    tasks = [task("one", 0, 100, dag_id="x"), task("two", 0, 100, dag_id="x")]
    assert by_name(run("pools", on, tasks))["two"].started_s == 100
    assert by_name(run("ours", on, tasks))["two"].started_s == 0


def test_a_gang_over_two_models_runs_as_long_as_on_the_slower() -> None:
    on = fleet({"a": ("A100", 1), "v": ("V100", 1)})
    found = by_name(run("ours", on, [task("gang", 0, {"A100": 10, "V100": 25}, gpus=2)]))
    assert found["gang"].ended_s == 25


def test_shares_of_a_device_run_together_in_ours() -> None:
    tasks = [task(name, 0, 10, milli=500) for name in "abc"]
    found = by_name(run("ours", ONE, tasks))
    assert [found[name].started_s for name in "abc"] == [0, 0, 10]


def test_a_share_by_memory_is_counted_by_the_device_it_is_on() -> None:
    tasks = [task(name, 0, 10, milli=1, memory_mib=8_192) for name in "abc"]
    result = run("ours", fleet({"v": ("V100", 1)}), tasks)
    assert [by_name(result)[name].started_s for name in "abc"] == [0, 0, 10], "8 of 16 GiB are a half"
    assert result.busy == ((0.0, 1.0), (10.0, 0.5), (20.0, 0.0))


def test_impatient_and_impossible_tasks_fail_and_harm_nobody() -> None:
    tasks = [
        task("long", 0, 100),
        task("impatient", 1, 10, queue_timeout_s=5),
        task("huge", 1, 10, gpus=9),
        task("next", 2, 10),
    ]
    ours, pools = by_name(run("ours", ONE, tasks)), by_name(run("pools", ONE, tasks))
    assert (ours["impatient"].end, ours["impatient"].ended_s) == (End.TIMED_OUT, 6)
    assert (ours["huge"].end, pools["huge"].end) == (End.REJECTED, End.NEVER_STARTED)
    assert ours["next"].started_s == pools["next"].started_s == 100


@pytest.mark.parametrize("policy", POLICIES)
def test_what_runs_already_keeps_its_devices_until_it_ends(policy: str) -> None:
    old = Running(task("old", -50, 80), (DeviceId("a/0"),), -50, 30)
    found = by_name(run(policy, ONE, [task("waiting", -20, 10)], [old]))
    assert found["old"].ended_s == 30
    assert (found["waiting"].started_s, found["waiting"].waited_s) == (30, 50)


def test_more_devices_never_lengthen_a_queue_of_single_tasks() -> None:
    tasks = [task(f"t{index:02d}", index, 10 + 7 * (index % 5)) for index in range(40)]
    ends = [
        max(outcome.ended_s for outcome in run("fifo", fleet({"a": ("A100", size)}), tasks).outcomes)
        for size in range(1, 9)
    ]
    assert ends == sorted(ends, reverse=True) and ends[0] > ends[-1]


def test_a_scheduler_that_gives_a_device_twice_is_found_out() -> None:
    class Generous(Ours):
        def turn(self, now):
            placements, rejected = super().turn(now)
            return tuple(Placement(each.claim_id, (DeviceId("a/0"),)) for each in placements), rejected

    on = fleet({"a": ("A100", 2)})
    with pytest.raises(AssertionError, match="a/0"):
        simulate(on, [task("one", 0, 10), task("two", 0, 10)], Generous(on))


def test_a_run_time_that_is_not_known_is_asked_for_before_the_run() -> None:
    with pytest.raises(InvalidRequest, match=r"'t' may run on V100.*known are A100.*runtime_s\.V100"):
        run("ours", TWO_MODELS, [task("t", 0, {"A100": 10})])
    only_a100 = task("t", 0, {"A100": 10}, models=frozenset({"A100"}))
    assert by_name(run("ours", TWO_MODELS, [only_a100]))["t"].ended_s == 10


def test_two_tasks_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="'t' is there twice"):
        run("ours", ONE, [task("t", 0, 10), task("t", 5, 10)])


def test_what_finished_tasks_showed_decides_where_later_ones_run() -> None:
    # Rated slower, the P100 is the faster one for this class; nothing else is known at first.
    on = fleet({"p": ("P100", 1), "v": ("V100", 1)})
    tasks = [
        task(f"t{index:03d}", 100.0 * (index // 2), {"P100": 20, "V100": 60}, task_class="recommend")
        for index in range(200)
    ]
    alone = task("last", 20_000, {"P100": 20, "V100": 60}, task_class="recommend")
    by_rating, learned = (by_name(run(policy, on, [*tasks, alone])) for policy in ("ours", "measured"))
    assert by_rating["last"].devices == (DeviceId("v/0"),)
    assert learned["last"].devices == (DeviceId("p/0"),)
