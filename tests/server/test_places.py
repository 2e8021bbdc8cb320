"""Every claim of a long queue has a place, a reason and, where those ahead have one, an expected start."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from airflow_gpu_provider.server.board import Entry
from airflow_gpu_provider.server.places import Place, places
from airflow_gpu_provider.wire import ClaimBody, RequestBody, TaskKey

NOW = datetime(2026, 3, 1, tzinfo=timezone.utc)


def entry(name: str, position: int | None, starts_in_s: float | None = None, *, gpus: int = 1) -> Entry:
    key = TaskKey(dag_id="d", run_id="r", task_id=name)
    made = Entry(name, ClaimBody(key=key, request=RequestBody(gpus=gpus)), NOW)
    made.position = position
    if position is not None:
        made.reason_code, made.reason = "devices_leased", f"asked {gpus}"
        made.expected_at = None if starts_in_s is None else NOW + timedelta(seconds=starts_in_s)
    return made


def told(*entries: Entry, worked_out: int) -> dict[str, Place]:
    def rank(each: Entry) -> tuple[float, datetime, str]:
        return 0.0, each.submitted_at, each.claim_id

    return {each.claim_id: place for each, place in places(entries, rank, NOW, worked_out)}


def test_claims_far_back_have_the_places_that_are_left_and_start_at_the_pace_of_those_ahead() -> None:
    stuck = entry("stuck", 6)
    stuck.impossible_since = NOW
    ahead = [entry("a", 1, 10), entry("b", 2, 40, gpus=2), entry("c", 3)]
    found = told(entry("z", None, gpus=9), stuck, entry("y", None, gpus=2), *ahead, worked_out=4)
    assert list(found) == ["a", "b", "c", "y", "z", "stuck"]
    assert [place.position for place in found.values()] == [1, 2, 3, 4, 5, 6]
    assert (found["y"].reason_code, found["y"].reason) == ("devices_leased", "asked 2")
    assert found["z"].reason is None, "nobody ahead asks for the same"
    starts = {
        name: place.expected_at and (place.expected_at - NOW).total_seconds() for name, place in found.items()
    }
    assert starts == {"a": 10, "b": 40, "c": 60, "y": 80, "z": 100, "stuck": None}


def test_of_a_short_queue_the_leader_tells_all_in_a_moment() -> None:
    found = told(entry("new", None), entry("a", 1, 10), worked_out=2)
    assert list(found) == ["a", "new"] and found["new"] == Place(None, None, None, None)


def test_without_promises_ahead_no_start_is_made_up() -> None:
    found = told(entry("a", 1), entry("b", None), worked_out=1)
    assert (found["b"].position, found["b"].expected_at) == (2, None)
