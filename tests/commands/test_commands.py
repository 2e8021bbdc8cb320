"""`airflow gpu …` as a person uses it: the parser of Airflow, a served broker."""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from typing import Any

import pytest
from sqlalchemy import insert

from airflow_gpu_provider.commands import parse_seconds
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.reservation_commands import local, parse_moment
from airflow_gpu_provider.server.auth import Role, verify_token
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.store.history import FinishedRun, run_row
from airflow_gpu_provider.store.tables import run
from tests.hooks.test_broker_hook import connect
from tests.server.conftest import SECRET, ask, look
from tests.stored_rows import pending


@pytest.fixture(autouse=True)
def connected(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, base_url)


def airflow(*words: str) -> None:
    """Run an `airflow` command in this process."""
    from airflow.cli.cli_parser import get_parser

    args = get_parser().parse_args(words)
    args.func(args)


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    out = capsys.readouterr().out
    result: list[dict[str, Any]] = json.loads(out[out.index("[") :])
    return result


def test_nodes_queue_and_leases_are_tables(broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    ask(broker, "first", 2, owner="ann")
    waiting = ask(broker, "second", 1, value=5)
    deadline = time.monotonic() + 20
    while not broker.repository.live_leases() or pending(broker.repository)[0].position is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    airflow("gpu", "nodes", "-o", "json")
    devices = rows(capsys)
    assert [row["state"] for row in devices] == ["leased", "leased"]
    assert devices[0]["utilisation"] == "N/A", "what is not measured is not 0"
    airflow("gpu", "queue", "-o", "json")
    (queued,) = rows(capsys)
    assert (queued["claim"], queued["position"], queued["asked"]) == (waiting, "1", "1 GPU")
    airflow("gpu", "leases", "-o", "json")
    (lease,) = rows(capsys)
    assert (lease["task"], lease["owner"], lease["devices"]) == ("d.first", "ann", "GPU-n1-0, GPU-n1-1")
    airflow("gpu", "nodes")
    assert "GPU-n1-0" in capsys.readouterr().out


def test_a_person_drains_and_undrains(
    broker: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__GPU__TOKEN_SECRET", SECRET)
    airflow("gpu", "drain", "GPU-n1-0", "--reason", "fan fails", "--for", "2h")
    assert "Drained device GPU-n1-0 until" in capsys.readouterr().out
    airflow("gpu", "drains", "-o", "json")
    (row,) = rows(capsys)
    assert (row["scope"], row["target"], row["reason"]) == ("device", "GPU-n1-0", "fan fails")
    airflow("gpu", "undrain", "GPU-n1-0")
    assert "Undrained" in capsys.readouterr().out
    assert broker.drains.in_force() == ()
    with pytest.raises(SystemExit, match="GPU-n1-0 is not drained"):
        airflow("gpu", "undrain", "GPU-n1-0")
    with pytest.raises(SystemExit, match="No agent reports a node or device 'n9'"):
        airflow("gpu", "drain", "n9", "--reason", "x")


def test_a_person_reserves_and_takes_it_back(
    broker: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__GPU__TOKEN_SECRET", SECRET)
    held = ask(broker, "late", 1)
    look(broker, held, "granted")
    airflow("gpu", "reserve", "--team", "vision", "--number", "2", "--from", "now", "--for", "8h")
    said = capsys.readouterr().out
    assert "Reserved 2 x GPU for team vision from" in said and "Kept now: GPU-n1-0, GPU-n1-1." in said
    assert "Others still hold some of them: d.late r try 1." in said
    airflow("gpu", "reservations", "-o", "json")
    (row,) = rows(capsys)
    assert (row["state"], row["for"], row["asked"]) == ("begun", "team vision", "2 x GPU")
    assert (row["kept"], row["overstays"]) == ("GPU-n1-0, GPU-n1-1", "d.late r try 1")
    airflow("gpu", "unreserve", row["reservation"])
    assert "is taken back" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="There is no reservation"):
        airflow("gpu", "unreserve", row["reservation"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--team t --from now --for 8h", "write one of the two"),
        ("--team t --device GPU-1 --number 1 --from now --for 8h", "write one of the two"),
        ("--number 1 --from now --for 8h", "whom it is for"),
        ("--team t --number 1 --from tomorrow --for 8h", "'tomorrow' is no time; write e.g. 'in 2h'"),
        (
            "--team t --number 1 --from 0001-01-01T00:00 --for 8h",
            "in the year 1|further away",
        ),
        ("--team t --number 1 --from 0001-01-01T00:00+05:00 --for 8h", "in the year 1"),
        ("--team t --number 1 --from 9999-12-31T23:59 --for 8h", "in the year 9999"),
        ("--team= --number 1 --from now --for 8h", "--team is empty: write a name or leave it out"),
        ("--team t --dag-id= --number 1 --from now --for 8h", "--dag-id is empty"),
        ("--team t --number 1 --model= --from now --for 8h", "--model is empty"),
        ("--team t --device GPU-1 --model A100 --from now --for 8h", "leave it out, or give --number"),
        ("--team t --number 9 --from now --for 8h", "asked 9 x GPU; the fleet has 2"),
        ("--team t --number -1 --from now --for 8h", "number: Input should be greater than"),
    ],
)
def test_a_wrong_reservation_ends_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, words: str, says: str
) -> None:
    monkeypatch.setenv("AIRFLOW__GPU__TOKEN_SECRET", SECRET)
    with pytest.raises(SystemExit, match=says):
        airflow("gpu", "reserve", *words.split())


@pytest.mark.parametrize("text", ["in 99999999999d", f"in {'9' * 400}d", "in 2000000d"])
def test_a_time_beyond_the_calendar_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is further away than calendars go; write e"):
        parse_moment(text, datetime(9000, 3, 1, 12, tzinfo=timezone.utc))


def test_a_time_is_read_with_its_zone_or_by_the_clock_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        now = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
        for text, utc in (
            ("now", "2026-03-01T12:00"),
            ("in 90m", "2026-03-01T13:30"),
            ("2026-03-01T14:00Z", "2026-03-01T14:00"),
            ("2026-03-01T14:00+02:00", "2026-03-01T12:00"),
            ("2026-03-01T14:00", "2026-03-01T13:00"),
            ("2026-07-01 14:00", "2026-07-01T12:00"),
        ):
            found = parse_moment(text, now).astimezone(timezone.utc)
            assert found.strftime("%Y-%m-%dT%H:%M") == utc, text
        assert local(now) == "2026-03-01 13:00 CET (UTC+0100)"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_what_was_learned_of_finished_runs_is_shown(
    broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [
        FinishedRun(f"l{number}", "d.fit", model, 1, ("n1",), units, 2.0, 20, failed, (), broker.clock())
        for model, units, failed in (("A100", 10.0, 0), ("V100", 20.0, 4))
        for number in range(3 * (model == "V100"), 3 + 3 * (model == "V100"))
    ]
    with broker.engine.begin() as connection:
        connection.execute(insert(run), [run_row(each) for each in told])
    broker.history.refresh()
    deadline = time.monotonic() + 20
    while len(list(broker.history.measured())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    airflow("gpu", "throughput", "-o", "json")
    a100, v100 = rows(capsys)
    assert (a100["units_per_s"], a100["rating"], a100["counts"]) == ("5", "35.0", "yes")
    assert (v100["units_per_s"], v100["runs"]) == ("10", "3")
    airflow("gpu", "throughput", "--task-class", "d.other", "-o", "json")
    assert "d.fit" not in capsys.readouterr().out
    airflow("gpu", "redundancy", "-o", "json")
    shown = rows(capsys)
    assert [row["model"] for row in shown] == ["(all)", "(all)", "A100", "V100"]
    airflow("gpu", "redundancy", "--model", "A100", "-o", "json")
    assert "--model A100 picks nothing without --task-class: all are shown" in capsys.readouterr().err
    airflow("gpu", "redundancy", "--task-class", "d.fit", "--model", "NVIDIA V100-SXM2", "-o", "json")
    (row,) = rows(capsys)
    assert row == shown[-1] and "shards of d.fit on V100 failed lately" in row["reason"]


def test_a_minted_token_is_alone_on_its_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__GPU__TOKEN_SECRET", "another long secret for this test alone")
    airflow("gpu", "token", "--role", "agent", "--node", "n7", "--ttl", "1h")
    token = capsys.readouterr().out.strip().splitlines()[-1]
    identity = verify_token("another long secret for this test alone", token)
    assert (identity.role, identity.node) == (Role.AGENT, "n7")


def test_mistakes_end_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__GPU__TOKEN_SECRET", "another long secret for this test alone")
    with pytest.raises(SystemExit, match=r"the roles are task, agent, admin"):
        airflow("gpu", "token", "--role", "boss")
    with pytest.raises(SystemExit, match=r"'gpu_nowhere' is not defined"):
        airflow("gpu", "nodes", "--conn-id", "gpu_nowhere")


@pytest.mark.parametrize(
    "text, seconds", [("600s", 600), ("90m", 5400), ("12h", 43_200), (" 30 d ", 2_592_000)]
)
def test_lengths_of_time_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "12", "h", "-1h", "1 week"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"e\.g\. 12h"):
        parse_seconds(text)
