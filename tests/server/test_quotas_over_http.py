"""Teams with quotas on a served broker: who waits for what its team gives back, and who goes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from airflow_gpu_provider.config import Settings

from .test_claims_over_http import queue, release, submit

Client = Callable[..., httpx.Client]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Return settings in which one team owns one of the two devices, and another may hold one at most."""
    quotas = '{"owner": {"devices": 1}, "small": {"limit": 1}}'
    return settings.model_copy(update={"quotas": quotas})


@pytest.fixture
def tasks(client: Client) -> httpx.Client:
    return client("task")


def of(team: str | None, task: str, *, value: float = 0, **request: Any) -> dict[str, Any]:
    key = {"dag_id": "d", "run_id": "r", "task_id": task, "try_number": 1}
    return {"key": key, "value": value, "team": team, "request": {"gpus": 1, **request}}


def test_a_claim_above_its_teams_limit_waits_for_its_team_and_one_that_never_fits_is_rejected(
    tasks: httpx.Client,
) -> None:
    never = submit(tasks, of("small", "never", gpus=2))
    assert (never["state"], never["reason_code"]) == ("rejected", "over_quota")
    held = submit(tasks, of("small", "first"))["lease"]
    assert submit(tasks, of("small", "second"), wait_s=0.5)["state"] == "pending"
    (row,) = queue(tasks)
    assert (row["team"], row["reason_code"], row["starts_in_s"]) == ("small", "over_quota", None)
    assert row["reason"] == (
        "asked 1 GPU; team small holds 1 and may have 1; starts when its team gives devices back"
    )
    (lease,) = tasks.get("/v1/leases").json()
    assert lease["team"] == "small"
    release(tasks, held)
    assert submit(tasks, of("small", "second"))["state"] == "granted"


def test_an_owner_goes_before_those_who_borrow_whatever_their_value(tasks: httpx.Client) -> None:
    first = [submit(tasks, of(None, f"first{number}"))["lease"] for number in range(2)]
    submit(tasks, of("other", "rich", value=1000), wait_s=0)
    owner = submit(tasks, of("owner", "poor"), wait_s=0)
    assert [row["key"]["task_id"] for row in queue(tasks)] == ["poor", "rich"]
    release(tasks, first[0])
    assert submit(tasks, of("owner", "poor"))["claim_id"] == owner["claim_id"]
    assert [row["key"]["task_id"] for row in queue(tasks)] == ["rich"]
