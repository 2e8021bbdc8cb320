"""Work whose lease is taken back saves, stops, and asks again within the same try."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from airflow_gpu_provider.exceptions import BrokerUnavailable, LeaseLost, LeasePreempted
from airflow_gpu_provider.operators.held_lease import HeldLease
from airflow_gpu_provider.operators.lease_time import LeaseTime
from airflow_gpu_provider.operators.leased import GpuLeasedOperator
from airflow_gpu_provider.wire import (
    ClaimState,
    ClaimView,
    DeviceView,
    LeaseView,
    ReleaseBody,
    RenewAnswer,
    RenewBody,
    TaskKey,
)

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
KEY = TaskKey(dag_id="d", run_id="r", task_id="t")


def lease(name: str, ttl_s: float = 30.0) -> LeaseView:
    device = DeviceView(id="GPU-1", node="n", host="h", model="A100", memory_mib=1, tflops=35, simulated=True)
    return LeaseView(
        lease_id=name,
        claim_id="c1",
        epoch=1,
        secret="s",
        devices=[device],
        match_degree=1.0,
        granted_at=NOW,
        expires_at=NOW + timedelta(seconds=ttl_s),
        ttl_s=ttl_s,
    )


def view(state: ClaimState, held: LeaseView | None = None) -> ClaimView:
    return ClaimView(claim_id="c1", key=KEY, state=state, lease=held)


class FakeHook:
    """The broker as a task sees it over HTTP."""

    def __init__(self, *answers: ClaimView | Exception, ends_in_s: float | None = None) -> None:
        self.answers = list(answers)
        self.ends_in_s = ends_in_s
        self.released: list[str] = []
        self.renewals: list[RenewBody] = []

    def for_renewals(self, ttl_s: float) -> FakeHook:
        return self

    def renew(self, lease_id: str, body: RenewBody) -> RenewAnswer:
        self.renewals.append(body)
        return RenewAnswer(expires_at=NOW, ends_in_s=self.ends_in_s, reason="taken back for claim c9")

    def release(self, lease_id: str, body: ReleaseBody) -> None:
        self.released.append(body.outcome)

    def collect(self, claim_id: str) -> ClaimView:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(self, claim_id: str, *, timeout_s: float) -> None:
        pass


class Twice(GpuLeasedOperator):
    """Is preempted the first time it works."""

    def run_leased(self, context: Any, held: HeldLease) -> str:
        self.worked = [*getattr(self, "worked", []), held.lease_id]
        if len(self.worked) == 1:
            raise LeasePreempted("taken back for claim c9")
        return "done"


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Twice:
    operator = Twice(task_id="t", deferrable=False)
    monkeypatch.setattr(operator, "_check_host", lambda held: None)
    return operator


def test_preempted_work_waits_again_and_is_called_anew_within_its_try(operator: Twice) -> None:
    hook = FakeHook(view(ClaimState.PENDING), view(ClaimState.GRANTED, lease("l2")))
    assert operator._work({}, hook, view(ClaimState.GRANTED, lease("l1"))) == "done"
    assert operator.worked == ["l1", "l2"]
    assert hook.released == ["preempted", "done"]


def test_a_lease_that_is_lost_for_good_ends_the_try(operator: Twice) -> None:
    hook = FakeHook(view(ClaimState.ENDED))
    with pytest.raises(LeaseLost, match="taken back"):
        operator._work({}, hook, view(ClaimState.GRANTED, lease("l1")))


def test_the_same_lease_is_not_worked_on_again(operator: Twice) -> None:
    hook = FakeHook(view(ClaimState.GRANTED, lease("l1")))
    with pytest.raises(LeasePreempted):
        operator._work({}, hook, view(ClaimState.GRANTED, lease("l1")))


def test_a_broker_that_cannot_be_asked_does_not_hide_why_the_lease_was_lost(operator: Twice) -> None:
    hook = FakeHook(BrokerUnavailable("down"))
    with pytest.raises(LeasePreempted):
        operator._work({}, hook, view(ClaimState.GRANTED, lease("l1")))


def test_the_work_hears_that_its_lease_ends_and_tells_how_old_its_checkpoint_is() -> None:
    hook = FakeHook(ends_in_s=60.0)
    held = HeldLease(lease("l1", ttl_s=1.5), hook)  # type: ignore[arg-type]
    with pytest.raises(LeasePreempted, match="taken back for claim c9"), held.working():
        held.note_checkpoint()
        assert held.ending.wait(20)
        held.raise_if_ending()
    assert hook.released == ["preempted"]
    assert hook.renewals[0].saved_s is not None


def test_a_lease_that_is_taken_back_is_good_no_longer_than_was_said() -> None:
    left = LeaseTime(30.0)
    left.renewed(RenewAnswer(expires_at=NOW, ends_in_s=5.0), asked_at=time.monotonic())
    assert left.ending.is_set() and left.left_s() <= 5.0
    left.renewed(RenewAnswer(expires_at=NOW), asked_at=time.monotonic())
    assert not left.ending.is_set() and left.left_s() > 5.0, "whom it was for went away"


def test_what_work_tells_of_itself_cannot_spoil_its_release() -> None:
    hook = FakeHook()
    held = HeldLease(lease("l1"), hook)  # type: ignore[arg-type]
    with held.working():
        held.report_work(2e12, seconds=1.0)
    assert hook.released == ["done"]


def test_the_default_task_class_of_long_names_is_short_and_tells_them_apart() -> None:
    class Instance:
        dag_id, task_id = "d" * 250, "t" * 250

    class Other:
        dag_id, task_id = "d" * 250, "t" * 249 + "u"

    operator = GpuLeasedOperator(task_id="t")
    assert len(operator.class_of(Instance)) == 250
    assert operator.class_of(Instance) != operator.class_of(Other)
