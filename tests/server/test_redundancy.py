"""From failures of finished trainings to redundant shards, over real HTTP and on every kind of database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.broker import Broker

from .conftest import report
from .test_history import Client, looks_often, run, settings, until

__all__ = ["looks_often", "settings"]


@pytest.fixture
def tasks(broker: Broker, client: Client) -> httpx.Client:
    """Return a task's client of a broker with one A100 on each of two hosts."""
    broker.report(ReportBody(nodes=(report("n1", gpus=1), report("n2", gpus=1, host="h2"))))
    return client("task")


@pytest.fixture
def train(tasks: httpx.Client) -> Callable[..., None]:
    """Return ``train(times, shards, failures)``: trainings that end, well or not, and tell of it."""

    def ended(times: int, shards: int, failures: int, *, host: str = "h1", **more: Any) -> None:
        node = {"h1": "n1", "h2": "n2"}[host]
        told = {"shards": shards, "failures": failures, "failed_on": [node] * failures, **more}
        for _ in range(times):
            run(tasks, told=told, task_class="d.train", host=host)

    return ended


def asked(tasks: httpx.Client, **query: str) -> dict[str, Any]:
    answer = tasks.get("/v1/redundancy", params={"task_class": "d.train", "model": "A100", **query})
    assert answer.status_code == 200, answer.text
    row: dict[str, Any] = answer.json()
    return row


def until_seen(tasks: httpx.Client, words: str) -> dict[str, Any]:
    """Return the answer as soon as its reason contains these words."""
    until(lambda: words in asked(tasks)["reason"], f"{words}: {asked(tasks)['reason']}")
    return asked(tasks)


def test_twice_the_failure_rate_is_redundant_rising_and_falling_with_it(
    tasks: httpx.Client, train: Callable[..., None]
) -> None:
    nothing = asked(tasks)
    assert (
        nothing["share"] == pytest.approx(0.10)
        and "nothing is known yet of d.train on A100" in nothing["reason"]
    )
    train(20, shards=20, failures=1)
    usual = until_seen(tasks, "20 of 400 shards")
    assert (usual["share"], usual["failure_rate"]) == (pytest.approx(0.10), pytest.approx(0.05))
    assert usual["reason"].startswith("10.0% redundant shards for a failure rate of 5.0%: 20 of 400 shards")
    train(20, shards=20, failures=2, outcome="failed")
    higher = until_seen(tasks, "60 of 800 shards")
    assert higher["share"] == pytest.approx(0.15, abs=0.01)
    train(20, shards=20, failures=5)
    beyond = until_seen(tasks, "160 of 1.2e+03 shards")
    assert beyond["share"] > 0.24
    train(15, shards=200, failures=0)
    falling = until_seen(tasks, "of 4.2e+03 shards")
    assert falling["share"] < 0.08
    train(10, shards=400, failures=20)
    assert until_seen(tasks, "of 8.2e+03 shards")["share"] == pytest.approx(0.09, abs=0.01)


def test_a_small_sample_does_not_jump(tasks: httpx.Client, train: Callable[..., None]) -> None:
    train(1, shards=2, failures=1)
    one = until_seen(tasks, "1 of 2 shards")
    assert 0.10 < one["share"] < 0.15, "half of the shards failed, but there were two"
    assert "drawn towards what is known of others" in one["reason"]
    train(1, shards=2, failures=0)
    assert 0.10 < until_seen(tasks, "1 of 4 shards")["share"] < one["share"]
    other = asked(tasks, task_class="d.other")
    assert 0.10 < other["share"] < 0.15 and "nothing is known yet of d.other on A100" in other["reason"]


def test_a_node_that_fails_more_often_asks_for_more(tasks: httpx.Client, train: Callable[..., None]) -> None:
    train(10, shards=20, failures=1, host="h1")
    train(10, shards=20, failures=4, host="h2")
    until_seen(tasks, "50 of 400 shards")
    good, bad = asked(tasks, host="h1"), asked(tasks, nodes="n2")
    assert good["share"] == pytest.approx(asked(tasks)["share"]), "a good record lowers nothing"
    assert bad["share"] == pytest.approx(asked(tasks, host="h2")["share"])
    assert bad["share"] > 1.2 * good["share"] and "these nodes fail" in bad["reason"]


def test_all_that_is_known_can_be_listed_by_tasks_and_not_by_agents(
    tasks: httpx.Client, train: Callable[..., None], client: Client
) -> None:
    (fleet,) = tasks.get("/v1/redundancies").json()
    assert (fleet["task_class"], fleet["model"], fleet["share"]) == (None, None, pytest.approx(0.10))
    train(1, shards=20, failures=1)
    until_seen(tasks, "1 of 20 shards")
    listed = [(row["task_class"], row["model"]) for row in tasks.get("/v1/redundancies").json()]
    assert listed == [(None, None), ("d.train", None), ("d.train", "A100")]
    assert client("agent").get("/v1/redundancies").status_code == 403
