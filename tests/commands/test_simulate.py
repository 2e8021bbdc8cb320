"""`airflow gpu simulate` as a person uses it: the parser of Airflow, a served broker."""

from __future__ import annotations

import json
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_provider import cli, scenes, what_if
from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import CyclePolicy, Fleet
from airflow_gpu_provider.broker.reservation import Kept, Reservation
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.rows import LeaseRow
from airflow_gpu_provider.scenes import Scene
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.simulation import policies
from airflow_gpu_provider.simulation.task import START
from airflow_gpu_provider.wire import RequestBody, TaskKey
from airflow_gpu_provider.wishes import ReservationBody
from tests.commands.test_commands import airflow, rows
from tests.hooks.test_broker_hook import connect
from tests.server.conftest import ask, report


@pytest.fixture(autouse=True)
def connected(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, base_url)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Ten tasks of 100 s that come together."""
    path = tmp_path / "trace.csv"
    path.write_text(
        "arrives_s,runtime_s,dag\n" + "".join(f"0,100,dag-{number % 2}\n" for number in range(10))
    )
    return str(path)


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    airflow("gpu", "simulate", *words, "-o", "json")
    return rows(capsys)


def test_the_present_queue_with_and_without_more_devices(
    broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(broker, "runs", 2)
    deadline = time.monotonic() + 20
    while not broker.repository.live_leases():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for number in range(4):
        ask(broker, f"waits-{number}", 2)
    airflow("gpu", "simulate", "--runtime", "10m", "--add", "8xA100", "-o", "json")
    printed = capsys.readouterr()
    now, more = json.loads(printed.out[printed.out.index("[") :])
    assert (now["fleet"], more["fleet"]) == ("as is", "+ 8xA100")
    assert (now["tasks"], now["finished"]) == ("5", "5")
    # Four gangs of two after one another behind what runs, or all at once beside it.
    assert float(now["makespan_s"]) == pytest.approx(5 * 600, abs=30)
    assert float(more["makespan_s"]) == pytest.approx(600, abs=30)
    assert "5 tasks promise no max_runtime: taken to run 10m" in printed.err


def test_what_is_reserved_is_respected(broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    """Both devices are reserved in 10 minutes for half an hour: who takes longer starts after that."""
    start = datetime.now(timezone.utc) + timedelta(minutes=10)
    broker.reservations.reserve(ReservationBody(starts_at=start, for_s=1800, team="vision", number=2), "ann")
    for team in ("text", "vision"):
        ask(broker, f"of-{team}", 2, team=team, max_runtime_s=1200)
    (row,) = simulated(capsys)
    # The owner's runs now; the other one would not end in time.
    assert float(row["makespan_s"]) == pytest.approx(2400 + 1200, abs=30)


def test_quotas_and_rules_of_the_configuration_are_those_of_the_simulated_broker(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "arrives_s,runtime_s,team,value\n0,100,text,1\n0,100,text,1\n0,100,text,0\n10,50,text,1\n"
    )
    options = ("--trace", str(path), "--fleet", "4xA100")
    assert [row["makespan_s"] for row in simulated(capsys, *options)] == ["100.0"]
    monkeypatch.setenv("AIRFLOW__GPU__QUOTAS", '{"text": {"limit": 2}}')
    assert [row["makespan_s"] for row in simulated(capsys, *options)] == ["200.0"]
    asked: list[CyclePolicy] = []

    def noted(policy: CyclePolicy, *args: Any, **more: Any) -> Engine:
        asked.append(policy)
        return Engine(policy, *args, **more)

    monkeypatch.setattr(policies, "Engine", noted)
    monkeypatch.setenv("AIRFLOW__GPU__AGEING_PER_MIN", "7")
    simulated(capsys, *options, "--policies", "ours,measured")
    assert [policy.ageing_per_min for policy in asked] == [7, 7]


def test_models_of_the_configuration_can_be_simulated(
    capsys: pytest.CaptureFixture[str], trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--trace", trace, "--fleet", "2x(2xQ1)", "--add", "2xQ2")
    with pytest.raises(SystemExit, match="'Q1' is no known model"):
        simulated(capsys, *options)
    own = '{"Q1": {"memory": "80GiB", "rating": 40}, "Q2": {"memory": "80GiB", "rating": 50}}'
    monkeypatch.setenv("AIRFLOW__GPU__FLAVORS", own)
    assert [row["fleet"] for row in simulated(capsys, *options)] == ["as is", "+ 2xQ2"]


def test_a_trace_on_a_described_fleet_by_all_policies(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    found = simulated(
        capsys, "--trace", trace, "--fleet", "2x(2xA100)", "--policies", "ours,fifo,pools,tflops"
    )
    assert [row["policy"] for row in found] == ["ours", "fifo", "pools", "tflops"]
    assert {row["makespan_s"] for row in found} == {"300.0"}
    (row,) = simulated(capsys, "--trace", trace, "--fleet", "5xA100", "--dag-id", "dag-1")
    assert (row["tasks"], row["makespan_s"]) == ("5", "200.0")


def test_a_table_is_for_people(capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "plot.html"
    airflow("gpu", "simulate", "--trace", trace, "--plot", str(page), "-o", "plain")
    assert "8m" in capsys.readouterr().out, "ten tasks of 100 s on the broker's two devices take 500 s"
    assert "10 tasks, simulated" in page.read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--trace", "/absent.csv"), r"cannot be read"),
        (("--fleet", "8xA100"), r"give --trace with --fleet"),
        ((), r"Nothing waits and nothing runs: give --trace"),
        (("--runtime", "soon"), r"e\.g\. 12h"),
        (("--plot", "plot.gif"), r"ends in \.png"),
        (("--trace", "TRACE", "--add", "16 cows"), r"'16 cows' is not COUNTxMODEL"),
        (("--trace", "TRACE", "--policies", "lifo"), r"There is no policy 'lifo'"),
        (("--trace", "TRACE", "--dag-id", "nightly"), r"No task is of DAG 'nightly'; there are dag-0, dag-1"),
    ],
)
def test_mistakes_end_with_a_sentence(words: tuple[str, ...], says: str, trace: str) -> None:
    with pytest.raises(SystemExit, match=says):
        airflow("gpu", "simulate", *(trace if word == "TRACE" else word for word in words))


def test_added_devices_come_in_nodes_of_eight_with_names_of_their_own() -> None:
    fleet = scenes.described_fleet("added-1:8xA100;b:2xV100")
    larger = scenes.enlarged(fleet, "20xA100")
    assert [(node.name, len(node.devices)) for node in larger.nodes] == [
        ("added-1", 8),
        ("b", 2),
        ("added-1-2", 8),
        ("added-2", 8),
        ("added-3", 4),
    ]
    ids = [device.id for node in larger.nodes for device in node.devices]
    assert len(set(ids)) == len(ids) == 30


def test_suspect_devices_are_not_simulated_as_free(
    broker: Broker, capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    broker.report(ReportBody(nodes=(report("n1", suspect="uncorrectable ECC"), report("n2", gpus=1))))
    (row,) = simulated(capsys, "--trace", trace)
    assert row["makespan_s"] == "1000.0"


@pytest.mark.parametrize(("age_s", "left_s"), [(30, 70), (500, 60)])
def test_what_overran_its_promise_is_taken_to_end_soon(age_s: float, left_s: float) -> None:
    fleet = scenes.described_fleet("n1:2xA100")
    began = datetime(2026, 3, 1, tzinfo=timezone.utc)
    lease = LeaseRow(
        lease_id="lease",
        key=TaskKey(dag_id="d", run_id="r", task_id="t"),
        request=RequestBody(gpus=2, max_runtime_s=100),
        owner=None,
        devices=["n1/0", "n1/1"],
        shares=[1.0],
        nodes=["n1"],
        granted_at=began,
        expires_in_s=20,
        epoch=1,
    )
    scene = scenes.present(fleet, [], [lease], began + timedelta(seconds=age_s), runtime_s=9)
    (running,) = scene.running
    assert (running.left_s, running.started_s, scene.assumed) == (left_s, -age_s, 0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "N/A"),
        (0, "0s"),
        (59.4, "59s"),
        (90, "2m"),
        (3900, "1h 05m"),
        (86_399, "1d 0h"),
        (190_000, "2d 4h"),
    ],
)
def test_lengths_for_people(seconds: float | None, text: str) -> None:
    assert what_if.length(seconds) == text


def test_the_simulated_broker_wakes_at_the_notice_that_the_installation_set() -> None:
    start = START + timedelta(hours=2)
    window = Reservation("r", start, start + timedelta(hours=1), by="ann", team="vision", number=1)
    scene = Scene(Fleet(), (), reservations=(Kept(window, frozenset()),))
    assert list(scene.wakes_s(timedelta(minutes=5))) == [6900, 7200, 10_800]


def test_the_help_names_every_policy() -> None:
    assert all(f" {name}" in str(cli._POLICIES.kwargs["help"]) for name in policies.POLICIES)
