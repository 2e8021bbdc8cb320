"""What finished runs tell, over real HTTP: speeds that move placements, on every kind of database."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server import history, views
from airflow_gpu_provider.server.broker import Broker

from .conftest import SECRET, report
from .test_claims_over_http import ask, release, submit

Client = Callable[..., httpx.Client]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_REFRESH_S", 0.05)


@pytest.fixture(params=["sqlite", "postgresql"])
def settings(request: pytest.FixtureRequest, settings: Settings) -> Settings:
    if request.param == "sqlite":
        return settings
    url = request.getfixturevalue("migrated_postgres_url")
    return Settings(token_secret=SECRET, sql_alchemy_conn=url, stale_after_s=600)


@pytest.fixture
def tasks(broker: Broker, client: Client) -> httpx.Client:
    """Return a task's client of a broker with one A100 and one V100."""
    nodes = (report("n1", gpus=1), report("n2", model="V100", gpus=1, host="h2"))
    broker.report(ReportBody(nodes=nodes))
    return client("task")


_numbers = iter(range(10**6))


def run(tasks: httpx.Client, *, told: dict[str, Any], **request: Any) -> str:
    """Hold a device and give it back with what the run told; return its model."""
    view = submit(tasks, ask(f"t{next(_numbers)}", **request))
    assert view["state"] == "granted", view
    assert release(tasks, view["lease"], **told).json() == {"released": True}
    model: str = view["lease"]["devices"][0]["model"]
    return model


def until(check: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def measure(tasks: httpx.Client, task_class: str = "d.render") -> None:
    """Let work of a class finish four times as fast on the V100."""
    for model, units in (("A100", 10.0), ("V100", 40.0)):
        for _ in range(4):
            run(tasks, told={"work": units, "work_s": 2.0}, models=[model], task_class=task_class)


def rows(tasks: httpx.Client) -> dict[str, dict[str, Any]]:
    return {row["model"]: row for row in tasks.get("/v1/throughput").json()}


def until_counted(tasks: httpx.Client) -> dict[str, dict[str, Any]]:
    until(lambda: [row["runs"] for row in rows(tasks).values()] == [4, 4], "all runs are known")
    found = rows(tasks)
    assert all(row["counts"] for row in found.values())
    return found


def test_work_goes_where_its_class_was_measured_fastest(broker: Broker, tasks: httpx.Client) -> None:
    assert run(tasks, told={}, task_class="d.render") == "A100", "by the ratings"
    measure(tasks)
    found = until_counted(tasks)
    assert {model: (row["runs"], row["units_per_s"]) for model, row in found.items()} == {
        "A100": (4, pytest.approx(5.0)),
        "V100": (4, pytest.approx(20.0)),
    }
    assert found["V100"]["speed"] > found["A100"]["speed"] and found["V100"]["rating"] == 15
    until(lambda: broker.leader._history_version == broker.history.version, "the engine learns it")
    assert run(tasks, told={}, task_class="d.render") == "V100"
    assert run(tasks, told={}, task_class="d.other", min_tflops=15.5) == "A100", "others go by the ratings"


def test_match_degree_and_strict_go_by_the_measured_speed_where_that_leaves_anything(
    broker: Broker, tasks: httpx.Client
) -> None:
    measure(tasks)
    until_counted(tasks)
    until(lambda: broker.leader._history_version == broker.history.version, "the engine learns it")
    for name, is_strict in (("soft", False), ("strict", True)):
        view = submit(tasks, ask(name, task_class="d.render", min_tflops=20, strict=is_strict))
        assert (view["lease"]["devices"][0]["model"], view["lease"]["match_degree"]) == ("V100", 1.0)
        release(tasks, view["lease"])
    rated = submit(tasks, ask("rated", task_class="d.render", min_tflops=34, strict=True))
    assert rated["lease"]["devices"][0]["model"] == "A100", "learning alone makes nothing impossible"
    never = submit(tasks, ask("never", task_class="d.render", min_tflops=36, strict=True))
    assert (never["reason_code"], "the fastest has 35" in never["reason"]) == ("exceeds_tflops", True)


def test_a_broker_that_starts_again_still_knows(broker: Broker, tasks: httpx.Client) -> None:
    measure(tasks)
    until_counted(tasks)
    again = Broker(broker.settings)
    try:
        again.leadership.hear_time()
        again.history.refresh()
        (known,) = again.history.speeds().values()
        assert known.by_model == pytest.approx(broker.history.speeds()["d.render"].by_model)
        quiet = Broker(broker.settings.model_copy(update={"measured_throughput": False}))
        quiet.leadership.hear_time()
        quiet.history.refresh()
        assert quiet.history.speeds() == {}
        assert list(quiet.history.measured()), "they can be looked at all the same"
        quiet.engine.dispose()
    finally:
        again.engine.dispose()


def test_failed_runs_and_few_runs_do_not_count(tasks: httpx.Client) -> None:
    for model in ("A100", "V100"):
        run(tasks, told={"work": 1, "work_s": 1}, models=[model], task_class="d.few")
        for _ in range(3):
            told = {"work": 1, "work_s": 1, "outcome": "failed"}
            run(tasks, told=told, models=[model], task_class="d.failed")
    until(lambda: len(rows(tasks)) == 2, "both are shown")
    for row in rows(tasks).values():
        assert (row["task_class"], row["runs"], row["counts"]) == ("d.few", 1, False)
        assert row["why_not"] == "1 run(s), 3 are needed"


def test_a_model_that_people_made_known_is_rated_everywhere(settings: Settings) -> None:
    own = '{"Q1": {"memory": "40GiB", "rating": 70}, "V100": {"rating": 50}}'
    broker = Broker(settings.model_copy(update={"flavors": own}))
    try:
        broker.leadership.hear_time()
        unknown = report("n1").devices[0].model_copy(update={"model": "Q1", "tflops": 0.0})
        nodes = (report("n1").model_copy(update={"devices": (unknown,)}), report("n2", model="V100", gpus=1))
        broker.mirror.fold(nodes, broker.clock())
        fleet = broker.mirror.fleet(broker.clock())
        assert [device.tflops for node in fleet.nodes for device in node.devices] == [70, 50]
        assert [row.tflops for node in views.nodes(broker) for row in node.devices] == [70, 50]
    finally:
        broker.engine.dispose()


def test_work_without_its_time_is_refused_by_name(tasks: httpx.Client) -> None:
    lease = submit(tasks, ask("one"))["lease"]
    answer = release(tasks, lease, work=5)
    assert (answer.status_code, "work_s" in answer.text) == (422, True)
