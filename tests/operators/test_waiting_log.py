"""How often a task says that it waits."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest

from airflow_gpu_provider.operators.waiting_log import WaitingLog
from airflow_gpu_provider.wire import ClaimState, ClaimView, TaskKey


def waits(position: int | None = 2, reason: str = "1 of 2 devices is free") -> ClaimView:
    key = TaskKey(dag_id="d", run_id="r", task_id="t", try_number=1)
    return ClaimView(
        claim_id="c", key=key, state=ClaimState.PENDING, position=position, reason=reason, starts_in_s=9.0
    )


def test_the_same_wait_is_told_ever_rarer_and_a_change_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    waiting = WaitingLog(logging.getLogger("waiting"))
    told_at = []
    for now in range(0, 3600, 20):
        before = len(caplog.records)
        waiting.tell(waits(), now=now)
        if len(caplog.records) > before:
            told_at.append(now)
    assert told_at[:5] == [0, 40, 120, 280, 580], "to every five minutes"
    assert {later - sooner for sooner, later in pairwise(told_at[4:])} == {300}

    for changed in (waits(position=1), waits(position=1, reason="all are leased")):
        before = len(caplog.records)
        waiting.tell(changed, now=3600)
        assert len(caplog.records) == before + 1
    assert caplog.messages[-1] == "Claim c waits: position 1, expected start in 9 s; all are leased"
