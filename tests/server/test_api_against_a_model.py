"""Random calls of the whole API over HTTP, against a model of what each answer must be.

The model knows only what the answers said: which claims wait, who holds which devices until when, what
is drained or suspect. After every call the broker's own lists must agree with it, and the first claim of the
queue must start as soon as its devices are free.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.clock import utc_now

from .conftest import report

FLEET = {"A100": [f"GPU-n1-{i}" for i in range(4)], "V100": [f"GPU-n2-{i}" for i in range(2)]}
MODEL_OF = {device: model for model, devices in FLEET.items() for device in devices}
TTL_S, COLLECT_S = 60.0, 120.0
#: A turn that began before the broker heard of it may still give a device out.
NOTICED = timedelta(seconds=0.5)
OVER = {"rejected", "cancelled", "ended"}

_runs = itertools.count()

#: What a claim for a share adds to its request.
Part = dict[str, int]


def share_of(milli: int, memory_mib: int) -> float:
    """Return what a member takes of a device, all of which have 40 GiB."""
    return 1.0 if milli == 1000 else max(milli, math.ceil(1000 * memory_mib / 40_960)) / 1000


@dataclass
class Known:
    """A claim, as the answers told of it."""

    claim_id: str
    key: dict[str, Any]
    gpus: int
    models: list[str]
    state: str
    part: Part
    lease: dict[str, Any] | None = None
    expires_at: datetime | None = None

    @property
    def devices(self) -> set[str]:
        return set() if self.lease is None else {device["id"] for device in self.lease["devices"]}


class Api(RuleBasedStateMachine):
    """Calls in any order; `http`, `broker` and `clock` are set by the test."""

    http: httpx.Client
    broker: Broker
    clock: list[timedelta]

    claims: Bundle[str] = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.run = next(_runs)
        self.known: dict[str, Known] = {}
        #: out of service, and since when
        self.drained: dict[str, datetime] = {}
        self.suspect: dict[str, datetime] = {}
        self.tasks = itertools.count()
        self._report()

    # -- claims
    @rule(
        target=claims,
        gpus=st.integers(1, 5),
        models=st.sampled_from([[], ["A100"], ["V100"], ["A100", "V100"]]),
        wait_s=st.sampled_from([0, 0.2]),
    )
    def submit(self, gpus: int, models: list[str], wait_s: float) -> str:
        key = {"dag_id": "d", "run_id": f"r{self.run}", "task_id": f"t{next(self.tasks)}", "try_number": 1}
        return self._submit(key, gpus, models, wait_s)

    @rule(
        target=claims,
        milli=st.sampled_from([1, 500, 900]),
        memory_mib=st.sampled_from([0, 4_096, 20_480, 40_960]),
        models=st.sampled_from([[], ["V100"]]),
    )
    def submit_a_share(self, milli: int, memory_mib: int, models: list[str]) -> str:
        key = {"dag_id": "d", "run_id": f"r{self.run}", "task_id": f"t{next(self.tasks)}", "try_number": 1}
        return self._submit(key, 1, models, 0.2, {"milli": milli, "memory_mib": memory_mib})

    @rule(claim=claims)
    def submit_again(self, claim: str) -> None:
        known = self.known[claim]
        assert self._submit(known.key, known.gpus, known.models, 0, known.part) == claim

    @rule(target=claims, claim=claims)
    def retry(self, claim: str) -> str:
        """A later try takes over what the last one holds, or ends it; an earlier one is over for good."""
        old = self.known[claim]
        key = {**old.key, "try_number": old.key["try_number"] + 1}
        before = old.devices if self._lives(old) else set()
        new = self._submit(key, old.gpus, old.models, 0.2, old.part)
        if new == claim:
            return new
        if self.known[new].lease is not None and before and not before & self._closed():
            assert self.known[new].devices == before, "a healthy lease passes on whole"
        if old.state not in OVER:
            self._over(old)
        return new

    @rule(claim=claims)
    def collect(self, claim: str) -> None:
        self._learn(self.known[claim], self._post(f"/v1/claims/{claim}/collect").json())

    @rule(claim=claims)
    def cancel(self, claim: str) -> None:
        known = self.known[claim]
        answer = self._post(f"/v1/claims/{claim}/cancel").json()
        if known.state == "granted" and self._lives(known):
            assert answer == {"cancelled": True}
        if known.state in OVER:
            assert answer == {"cancelled": False}
        self._over(known)

    # -- leases
    @rule(claim=claims)
    def renew(self, claim: str) -> None:
        known = self.known[claim]
        if known.lease is None:
            return
        answer = self._call_lease(known, "renew")
        if self._lives(known):
            assert answer.status_code == 200
            known.expires_at = datetime.fromisoformat(answer.json()["expires_at"])
        elif known.state in OVER:
            assert answer.status_code == 409

    @rule(claim=claims)
    def renew_with_a_wrong_secret(self, claim: str) -> None:
        known = self.known[claim]
        if known.lease is None:
            return
        body = {"secret": "guessed", "epoch": known.lease["epoch"]}
        assert self.http.post(f"/v1/leases/{known.lease['lease_id']}/renew", json=body).status_code == 403

    @rule(claim=claims)
    def release(self, claim: str) -> None:
        known = self.known[claim]
        if known.lease is None:
            return
        answer = self._call_lease(known, "release")
        if self._lives(known):
            assert answer.json() == {"released": True}
        elif known.state in OVER:
            assert answer.status_code == 409 or answer.json() == {"released": False}
        self._over(known)

    @rule(claim=consumes(claims))
    def forget(self, claim: str) -> None:
        """A holder that died: its lease ends by its TTL."""

    # -- fleet and time
    @rule(device=st.sampled_from(sorted(MODEL_OF)), is_drain=st.booleans())
    def drain(self, device: str, is_drain: bool) -> None:
        if is_drain:
            self._post("/v1/drains", {"target": device, "reason": "test"})
            self.drained.setdefault(device, self._now())
        else:
            self._post("/v1/undrain", {"target": device})
            self.drained.pop(device, None)

    @rule(device=st.sampled_from(sorted(MODEL_OF)), is_suspect=st.booleans())
    def report(self, device: str, is_suspect: bool) -> None:
        if is_suspect:
            self.suspect.setdefault(device, self._now())
        else:
            self.suspect.pop(device, None)
        self._report()

    @rule(seconds=st.sampled_from([5.0, TTL_S + 1, COLLECT_S + 1]))
    def pass_time(self, seconds: float) -> None:
        self.clock[0] += timedelta(seconds=seconds)
        self._report()
        self.broker.wakeup.ring_leader()
        self._until(lambda: all(row["expires_in_s"] > 0 for row in self._get("/v1/leases")))

    # -- what always holds
    @invariant()
    def no_device_is_leased_beyond_the_whole_of_it(self) -> None:
        assert all(part <= 1 + 1e-9 for part in self._taken().values())

    @invariant()
    def what_is_over_stays_over_and_who_holds_still_holds(self) -> None:
        for known in self.known.values():
            before, holds = known.state, self._lives(known)
            devices = known.devices
            self._learn(known, self._post(f"/v1/claims/{known.claim_id}/collect").json())
            if before in OVER:
                assert known.state == before
            if holds:
                assert known.state == "granted" and known.devices == devices

    @invariant()
    def the_first_claim_of_the_queue_starts_when_its_devices_are_free(self) -> None:
        self._until(lambda: not self._could_start())

    @invariant()
    def each_list_agrees_with_the_claims(self) -> None:
        def agrees() -> bool:
            views = [self._post(f"/v1/claims/{claim_id}/collect").json() for claim_id in self.known]
            waiting = {view["claim_id"] for view in views if view["state"] == "pending"}
            holding = {view["lease"]["lease_id"] for view in views if view["state"] == "granted"}
            queued = {row["claim_id"] for row in self._get("/v1/queue")}
            return queued == waiting and {row["lease_id"] for row in self._get("/v1/leases")} == holding

        self._until(agrees)

    def teardown(self) -> None:
        for known in self.known.values():
            self._post(f"/v1/claims/{known.claim_id}/cancel")
        for device in self.drained:
            self._post("/v1/undrain", {"target": device})
        self.suspect.clear()
        self._report()

    # -- the model
    def _submit(
        self, key: dict[str, Any], gpus: int, models: list[str], wait_s: float, part: Part | None = None
    ) -> str:
        part = part or {}
        body = {"key": key, "request": {"gpus": gpus, "models": models, **part}}
        view = self.http.post("/v1/claims", params={"wait_s": wait_s}, json=body).raise_for_status().json()
        known = self.known.setdefault(
            view["claim_id"], Known(view["claim_id"], key, gpus, models, view["state"], part)
        )
        if gpus > sum(len(devices) for model, devices in FLEET.items() if not models or model in models):
            assert known.state in OVER or self._eventually_is(known, "rejected")
        self._learn(known, view)
        return known.claim_id

    def _learn(self, known: Known, view: dict[str, Any]) -> None:
        known.state = view["state"]
        if view["lease"] is None:
            if known.state != "granted":
                known.expires_at = None
            return
        is_new = known.lease is None or known.lease["lease_id"] != view["lease"]["lease_id"]
        known.lease = view["lease"]
        known.expires_at = datetime.fromisoformat(view["lease"]["expires_at"])
        if is_new:
            assert len(known.devices) == known.gpus, "all members of a gang or none"
            assert not known.models or {MODEL_OF[device] for device in known.devices} <= set(known.models)
            granted_at = datetime.fromisoformat(view["lease"]["granted_at"])
            for since in (self.drained, self.suspect):
                closed = {device for device, at in since.items() if at + NOTICED <= granted_at}
                assert not known.devices & closed, "what is out of service is not given out"

    def _closed(self) -> set[str]:
        return {*self.drained, *self.suspect}

    def _lives(self, known: Known) -> bool:
        return known.state == "granted" and known.expires_at is not None and known.expires_at > self._now()

    def _over(self, known: Known) -> None:
        view = self._post(f"/v1/claims/{known.claim_id}/collect").json()
        assert view["state"] in OVER
        self._learn(known, view)

    def _could_start(self) -> bool:
        """Tell whether the first of the queue waits though its devices are free."""
        rows = self._get("/v1/queue")
        taken = self._taken()
        if not rows:
            return False
        first = min(rows, key=self._rank)
        models = first["request"]["models"]
        request = first["request"]
        suitable = [
            device
            for device in set(MODEL_OF) - self._closed()
            if (not models or MODEL_OF[device] in models)
            and taken[device] + share_of(request["milli"], request["memory_mib"]) <= 1 + 1e-9
        ]
        # A gang is of one model where the fleet has one with so many devices.
        gangs = [
            set(devices)
            for model, devices in FLEET.items()
            if len(devices) >= request["gpus"] and (not models or model in models)
        ]
        return any(len(each & set(suitable)) >= request["gpus"] for each in gangs or [set(MODEL_OF)])

    def _taken(self) -> Counter[str]:
        taken: Counter[str] = Counter()
        for row in self._get("/v1/leases"):
            taken.update(dict(zip(row["devices"], row["shares"], strict=True)))
        return taken

    def _rank(self, row: dict[str, Any]) -> tuple[float, str, str]:
        """Return the place in the queue: smaller work first, but waiting makes up for it."""
        policy = self.broker.settings.cycle_policy()
        aged = policy.ageing_per_min * row["waiting_s"] / 60
        devices = row["request"]["gpus"] * row["request"]["milli"] / 1000
        smaller = policy.small_first * math.log2(max(1.0, devices * 4 * 60))
        return smaller - aged, row["submitted_at"], row["claim_id"]

    def _eventually_is(self, known: Known, state: str) -> bool:
        def look() -> bool:
            return bool(self._post(f"/v1/claims/{known.claim_id}/collect").json()["state"] == state)

        self._until(look)
        return True

    # -- the broker
    def _now(self) -> datetime:
        return utc_now() + self.clock[0]

    def _report(self) -> None:
        nodes = (report("n1", gpus=4), report("n2", model="V100", gpus=2))
        marked = tuple(
            node.model_copy(
                update={
                    "devices": tuple(
                        device.model_copy(update={"suspect": "ECC" if device.id in self.suspect else None})
                        for device in node.devices
                    )
                }
            )
            for node in nodes
        )
        self.broker.report(ReportBody(nodes=marked))

    def _post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return self.http.post(path, json=body or {}).raise_for_status()

    def _get(self, path: str) -> Any:
        return self.http.get(path).raise_for_status().json()

    def _call_lease(self, known: Known, what: str) -> httpx.Response:
        assert known.lease is not None
        body = {"secret": known.lease["secret"], "epoch": known.lease["epoch"]}
        return self.http.post(f"/v1/leases/{known.lease['lease_id']}/{what}", json=body)

    @staticmethod
    def _until(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < deadline, "the broker did not come to it"
            time.sleep(0.01)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, broker: Broker) -> Iterator[list[timedelta]]:
    """Let the broker's time be moved forward."""
    ahead = [timedelta()]
    for part in (broker, broker.desk, broker.leader, broker.drains):
        name = "clock" if part is broker else "_clock"
        monkeypatch.setattr(part, name, lambda: utc_now() + ahead[0])
    yield ahead


def test_the_api_does_what_its_answers_promise(
    broker: Broker, client: Callable[..., httpx.Client], clock: list[timedelta]
) -> None:
    Api.http, Api.broker, Api.clock = client("admin"), broker, clock
    run_state_machine_as_test(
        Api,
        settings=settings(
            max_examples=25,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
