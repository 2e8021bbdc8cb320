"""The share of redundant shards follows the failures that were seen, without jumping."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.broker.model import NodeName
from airflow_gpu_provider.broker.redundancy import FailureHistory, RedundancyPolicy, RunOutcome

from .builders import NOW

quick = settings(max_examples=150, deadline=None)


def run(
    shards: int,
    failures: int,
    *,
    task_class: str | None = "tuning",
    model: str | None = "A100",
    nodes: tuple[str, ...] = ("n0",),
    days_ago: float = 0,
    failed_on: tuple[str, ...] = (),
) -> RunOutcome:
    return RunOutcome(
        task_class,
        model,
        tuple(NodeName(name) for name in nodes),
        shards,
        failures,
        NOW - timedelta(days=days_ago),
        tuple(NodeName(name) for name in failed_on),
    )


def share(history: FailureHistory, task_class: str | None = "tuning", model: str | None = "A100") -> float:
    return history.redundancy(task_class, model, now=NOW).share


def test_without_history_a_tenth_of_the_shards_is_redundant() -> None:
    told = FailureHistory().redundancy("tuning", "A100", now=NOW)
    assert told.share == pytest.approx(0.10)
    assert told.reason.startswith(
        "10.0% redundant shards for a failure rate of 5.0%: nothing is known yet of tuning on A100"
    )


@pytest.mark.parametrize(
    ("rate", "least", "most"),
    [(0.05, 0.095, 0.105), (0.08, 0.15, 0.165), (0.15, 0.28, 0.31), (0.0, 0.0, 0.01)],
)
def test_five_percent_of_failures_ask_for_ten_percent_and_more_for_more(
    rate: float, least: float, most: float
) -> None:
    history = FailureHistory(run(100, round(100 * rate)) for _ in range(30))
    assert least <= share(history) <= most


def test_one_bad_run_moves_the_share_a_little_and_many_move_it_fully() -> None:
    one = FailureHistory([run(4, 1)])
    assert 0.10 < share(one) < 0.13
    on_node = one.redundancy("tuning", "A100", [NodeName("n0")], now=NOW)
    assert share(one) < on_node.share < 0.15
    many = FailureHistory(run(4, 1) for _ in range(200))
    assert share(many) > 0.42


def test_the_share_falls_again_when_runs_go_well() -> None:
    history = FailureHistory(run(10, 3, days_ago=14) for _ in range(20))
    before = history.redundancy("tuning", "A100", now=NOW - timedelta(days=14)).share
    for _ in range(40):
        history.add(run(10, 0))
    assert before > 0.3
    assert share(history) < 0.1


def test_what_nobody_saw_for_long_fades_to_what_is_usual() -> None:
    history = FailureHistory([run(400, 200)])
    later = history.redundancy("tuning", "A100", now=NOW + timedelta(days=90))
    assert share(history) > 0.4
    assert later.share == pytest.approx(0.10, abs=0.005)


def test_a_new_class_starts_from_the_fleet_and_a_new_model_from_its_class() -> None:
    history = FailureHistory(
        [
            *(run(100, 12, task_class="tuning") for _ in range(20)),
            *(run(100, 1, task_class="nerf") for _ in range(20)),
        ]
    )
    assert share(history, "nerf", "V100") < share(history, "unseen") < share(history, "tuning", "V100")


def test_a_run_counts_once_and_not_again_at_each_level() -> None:
    policy = RedundancyPolicy()
    told = FailureHistory([run(60, 30)], policy).redundancy("tuning", "A100", now=NOW)
    assert told.failure_rate == pytest.approx((30 + 60 * 0.05) / 120)


def test_a_node_that_fails_more_than_its_runs_explain_raises_the_share() -> None:
    history = FailureHistory(
        run(8, 1, nodes=("good", "bad"), failed_on=("bad",) if number % 10 else ("good",))
        for number in range(60)
    )
    good = history.redundancy("tuning", "A100", [NodeName("good")], now=NOW)
    bad = history.redundancy("tuning", "A100", [NodeName("bad")], now=NOW)
    unknown = history.redundancy("tuning", "A100", [NodeName("new")], now=NOW)
    assert good.share == unknown.share < bad.share
    assert "times as often as others" in bad.reason
    assert "times as often" not in good.reason


def test_a_node_is_not_blamed_for_the_kind_of_work_it_gets() -> None:
    risky = [run(50, 15, task_class="risky", nodes=("n0",)) for _ in range(10)]
    safe = [run(50, 1, task_class="safe", nodes=("n1",)) for _ in range(10)]
    history = FailureHistory([*risky, *safe])
    assert history.excess_of(NodeName("n0"), NOW) == pytest.approx(1.0, abs=0.15)


def test_spares_are_whole_and_a_part_of_one_is_one() -> None:
    told = FailureHistory().redundancy(None, None, now=NOW)
    assert [told.spares(shards) for shards in (1, 10, 11, 40)] == [1, 1, 2, 4]


@pytest.mark.parametrize(("shards", "failures"), [(0, 0), (4, 5), (4, -1)])
def test_counts_that_cannot_be_are_refused(shards: int, failures: int) -> None:
    with pytest.raises(ValueError, match="count each shard at most once"):
        FailureHistory([run(shards, failures)])


@st.composite
def outcomes(draw: st.DrawFn) -> RunOutcome:
    shards = draw(st.integers(1, 40))
    return run(
        shards,
        draw(st.integers(0, shards)),
        task_class=draw(st.sampled_from(["a", "b", None])),
        model=draw(st.sampled_from(["A100", "V100", None])),
        nodes=tuple(draw(st.lists(st.sampled_from(["n0", "n1", "n2"]), min_size=1, max_size=3))),
        days_ago=draw(st.floats(0, 60)),
    )


@given(data=st.data(), seen=st.lists(outcomes(), max_size=25))
@quick
def test_the_order_in_which_runs_are_told_changes_nothing(
    data: st.DataObject, seen: list[RunOutcome]
) -> None:
    one, two = FailureHistory(seen), FailureHistory(data.draw(st.permutations(seen)))
    for nodes in ([], [NodeName("n0"), NodeName("n2")]):
        told, other = (each.redundancy("a", "A100", nodes, now=NOW) for each in (one, two))
        assert told.share == pytest.approx(other.share)


@given(seen=st.lists(outcomes(), max_size=25), new=outcomes())
@quick
def test_the_share_stays_in_bounds_and_one_run_moves_it_by_no_more_than_its_weight(
    seen: list[RunOutcome], new: RunOutcome
) -> None:
    history = FailureHistory(seen)
    before = share(history, "a")
    history.add(new)
    after = share(history, "a")
    assert 0.0 <= after <= 0.5
    # A run of n shards weighs at most n / (n + strength) against all that is known.
    assert abs(after - before) <= 2 * new.shards / (new.shards + RedundancyPolicy().strength) + 1e-9


@given(seen=st.lists(outcomes(), max_size=25), shards=st.integers(1, 40), data=st.data())
@quick
def test_more_failures_never_lower_the_share(
    seen: list[RunOutcome], shards: int, data: st.DataObject
) -> None:
    few = data.draw(st.integers(0, shards))
    many = data.draw(st.integers(few, shards))
    calm, rough = (FailureHistory([*seen, run(shards, failures, task_class="a")]) for failures in (few, many))
    assert share(calm, "a") <= share(rough, "a") + 1e-9
