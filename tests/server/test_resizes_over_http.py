"""A lease grows, shrinks and moves over real HTTP, decided by a real leader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.clock import utc_now

from .conftest import report, until_leading
from .test_claims_over_http import ask, release, submit

Client = Callable[..., httpx.Client]

SMALL, LARGE = 16_384, 81_920


class Clock:
    """The broker's time, which a test may let run ahead."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def __call__(self) -> datetime:
        return utc_now() + self.ahead


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker(settings: Settings, clock: Clock) -> Iterator[Broker]:
    """Yield a broker with two small devices on n1."""
    broker = Broker(settings.model_copy(update={"lease_ttl_s": 3600, "stale_after_s": 7200}), clock=clock)
    broker.start()
    broker.report(ReportBody(nodes=(report(model="V100", memory_mib=SMALL),)))
    until_leading(broker)
    yield broker
    broker.stop()


@pytest.fixture
def tasks(client: Client) -> httpx.Client:
    return client("task")


def held_by(broker: Broker, device: str) -> list[str]:
    return [holder.lease_id for holder in broker.holders()(device)]


def change(tasks: httpx.Client, lease: dict[str, Any], verb: str, **body: Any) -> httpx.Response:
    body = {"secret": lease["secret"], "epoch": lease["epoch"], **body}
    return tasks.post(f"/v1/leases/{lease['lease_id']}/{verb}", json=body, timeout=30)


def good(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(answer: httpx.Response) -> tuple[str, str]:
    assert answer.status_code == 412, answer.text
    detail = answer.json()["detail"]
    return detail["reason"], detail["message"]


def ids(lease: dict[str, Any], what: str = "devices") -> list[str]:
    return [device["id"] for device in lease[what]]


@pytest.fixture
def lease(broker: Broker, tasks: httpx.Client) -> dict[str, Any]:
    """Return a lease of a small device; two large ones join its host afterwards."""
    view = submit(tasks, ask("one", memory_mib=1))
    broker.report(ReportBody(nodes=(report("n2", memory_mib=LARGE),)))
    assert ids(view["lease"]) in (["GPU-n1-0"], ["GPU-n1-1"])
    found: dict[str, Any] = view["lease"]
    return found


def free(tasks: httpx.Client) -> list[str]:
    nodes = tasks.get("/v1/nodes").json()
    return sorted(d["id"] for node in nodes for d in node["devices"] if d["state"] == "free")


def shown(tasks: httpx.Client, lease: dict[str, Any]) -> dict[str, Any]:
    (row,) = [row for row in tasks.get("/v1/leases").json() if row["lease_id"] == lease["lease_id"]]
    found: dict[str, Any] = row
    return found


def test_memory_grows_in_place_and_members_join_and_leave(tasks: httpx.Client, lease: dict[str, Any]) -> None:
    grown = good(change(tasks, lease, "resize", memory_mib=SMALL))
    assert (grown["offer"], ids(grown["lease"])) == (None, ids(lease))
    assert shown(tasks, lease)["request"]["memory_mib"] == SMALL
    wider = good(change(tasks, lease, "resize", gpus=3))["lease"]
    assert ids(wider)[:1] == ids(lease) and len(set(ids(wider))) == 3
    assert good(change(tasks, lease, "resize", gpus=3))["lease"] == wider, "told again"
    back = good(change(tasks, lease, "resize", gpus=2, leave=ids(wider)[:1]))["lease"]
    assert ids(back) == ids(wider)[1:]
    assert good(change(tasks, lease, "resize", gpus=2, leave=ids(wider)[:1]))["lease"] == back
    assert shown(tasks, lease)["devices"] == ids(back)
    assert release(tasks, lease).json() == {"released": True}
    assert len(free(tasks)) == 4


def test_what_is_given_back_goes_to_those_who_wait_and_they_come_before_who_grows(
    tasks: httpx.Client,
    lease: dict[str, Any],
) -> None:
    lease = good(change(tasks, lease, "resize", gpus=3))["lease"]
    assert ids(lease)[1:] == ["GPU-n2-0", "GPU-n2-1"]
    waiting = submit(tasks, ask("two", gpus=2, models=["V100"]), wait_s=0)["claim_id"]
    reason, message = refused(change(tasks, lease, "resize", gpus=4))
    assert reason == "not_resized"
    assert "asked 4 members, has 3" in message and "stays as it is" in message
    good(change(tasks, lease, "resize", gpus=2, leave=ids(lease)[:1]))
    body = {"claim_ids": [waiting], "timeout_s": 20}
    (granted,) = tasks.post("/v1/claims/wait", json=body, timeout=30).json()["ready"]
    assert granted["state"] == "granted"


def test_a_move_holds_both_places_until_it_is_committed(
    broker: Broker, tasks: httpx.Client, lease: dict[str, Any]
) -> None:
    (old,) = ids(lease)
    answer = good(change(tasks, lease, "resize", memory_mib=LARGE))
    offer = answer["offer"]
    (new,) = ids(offer)
    assert (ids(answer["lease"]), offer["phase"], offer["moves"]) == ([old], "offered", [[old, new]])
    assert offer["devices"][0]["memory_mib"] == LARGE
    assert good(change(tasks, lease, "resize", memory_mib=LARGE))["offer"]["offer_id"] == offer["offer_id"]
    assert new not in free(tasks)
    assert "offered until" in shown(tasks, lease)["move"] and f"{old} to {new}" in shown(tasks, lease)["move"]
    assert (held_by(broker, old), held_by(broker, new)) == ([lease["lease_id"]], []), "nobody may work there"

    accepted = good(change(tasks, lease, "accept", offer_id=offer["offer_id"]))["offer"]
    assert accepted["phase"] == "accepted"
    assert 60 < accepted["expires_in_s"] <= 600
    assert held_by(broker, old) == held_by(broker, new) == [lease["lease_id"]]

    moved = good(change(tasks, lease, "commit", offer_id=offer["offer_id"]))
    assert (ids(moved["lease"]), moved["offer"]) == ([new], None)
    assert moved["lease"]["secret"] == lease["secret"], "it is the same lease"
    assert (held_by(broker, old), held_by(broker, new)) == ([], [lease["lease_id"]])
    assert old in free(tasks)
    again = good(change(tasks, lease, "commit", offer_id=offer["offer_id"]))
    assert again == moved, "a commit whose answer was lost"
    assert shown(tasks, lease)["move"] is None
    assert good(change(tasks, lease, "renew"))
    release(tasks, lease)
    assert len(free(tasks)) == 4


@pytest.mark.parametrize("how", ["decline", "run out", "run out accepted"])
def test_an_offer_that_is_over_frees_the_new_place_only(
    tasks: httpx.Client, lease: dict[str, Any], clock: Clock, how: str
) -> None:
    offer = good(change(tasks, lease, "resize", memory_mib=LARGE))["offer"]
    name = {"offer_id": offer["offer_id"]}
    if how == "decline":
        for _ in range(2):
            assert good(change(tasks, lease, "decline", **name))["offer"] is None
    else:
        if how == "run out accepted":
            good(change(tasks, lease, "accept", **name))
        clock.ahead = timedelta(seconds=601 if "accepted" in how else 61)
        deadline = time.monotonic() + 20
        while len(free(tasks)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert shown(tasks, lease)["devices"] == ids(lease)
    for verb in ("accept", "commit"):
        reason, message = refused(change(tasks, lease, verb, **name))
        assert reason == "no_offer" and "old devices are still held" in message
    other = submit(tasks, ask("two", gpus=2, models=["A100"]))
    assert other["state"] == "granted", "both large ones are free"


def test_a_move_needs_to_be_accepted_and_stands_in_the_way_of_another_wish(
    tasks: httpx.Client, lease: dict[str, Any]
) -> None:
    offer = good(change(tasks, lease, "resize", memory_mib=LARGE))["offer"]
    assert "accept it before" in refused(change(tasks, lease, "commit", offer_id=offer["offer_id"]))[1]
    assert "commit or decline it first" in refused(change(tasks, lease, "resize", gpus=2))[1]
    assert refused(change(tasks, lease, "accept", offer_id="another"))[0] == "no_offer"


def test_what_no_device_has_is_refused_with_the_numbers(tasks: httpx.Client, lease: dict[str, Any]) -> None:
    _, message = refused(change(tasks, lease, "resize", memory_mib=LARGE + 1))
    assert "asked 80GiB" in message and "the largest has 16GiB" in message


def test_every_change_needs_the_secret_of_the_lease_and_its_epoch(
    tasks: httpx.Client, lease: dict[str, Any]
) -> None:
    bodies = {"resize": {"gpus": 2}} | {verb: {"offer_id": "x"} for verb in ("accept", "commit", "decline")}
    for verb, body in bodies.items():
        guessed = change(tasks, {**lease, "secret": "guess"}, verb, **body)
        assert (guessed.status_code, guessed.json()["detail"]["reason"]) == (403, "lease_secret")
    release(tasks, lease)
    for verb, body in bodies.items():
        assert change(tasks, lease, verb, **body).status_code == 409


def test_an_old_try_cannot_change_what_the_next_one_took_over(
    tasks: httpx.Client, lease: dict[str, Any]
) -> None:
    good(change(tasks, lease, "resize", memory_mib=LARGE))
    same = ask("one", memory_mib=1, try_number=2)
    later = submit(tasks, same)["lease"]
    assert (later["lease_id"], later["epoch"]) == (lease["lease_id"], 2)
    lost = change(tasks, lease, "resize", gpus=2)
    assert (lost.status_code, "epoch 2" in lost.json()["detail"]["message"]) == (409, True)
    assert len(free(tasks)) == 3, "the offer of the old try is over"
    assert good(change(tasks, later, "resize", gpus=2))


def test_a_resized_lease_is_not_what_the_next_try_asks_for(
    tasks: httpx.Client, lease: dict[str, Any]
) -> None:
    good(change(tasks, lease, "resize", gpus=2))
    same = ask("one", memory_mib=1, try_number=2)
    later = submit(tasks, same)["lease"]
    assert later["lease_id"] != lease["lease_id"] and len(later["devices"]) == 1
    assert len(free(tasks)) == 3


@pytest.mark.parametrize(
    "wrong", [{}, {"gpus": 1, "memory_mib": 1}, {"gpus": 0}, {"memory_mib": 0}, {"memory": "8GiB"}]
)
def test_a_wish_that_is_none_is_refused_by_field(
    tasks: httpx.Client, lease: dict[str, Any], wrong: dict[str, Any]
) -> None:
    answer = change(tasks, lease, "resize", **wrong)
    assert answer.status_code == 422, answer.text


def test_a_resized_lease_is_the_same_after_the_tables_are_loaded_again(
    broker: Broker, tasks: httpx.Client, lease: dict[str, Any]
) -> None:
    good(change(tasks, lease, "resize", gpus=2))
    offer = good(change(tasks, lease, "resize", memory_mib=LARGE))["offer"]
    before = shown(tasks, lease)
    broker.leader._must_load = True
    broker.wakeup.ring_leader()
    deadline = time.monotonic() + 20
    while broker.leader._must_load:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    after = shown(tasks, lease)
    assert {**after, "expires_in_s": 0} == {**before, "expires_in_s": 0}
    good(change(tasks, lease, "accept", offer_id=offer["offer_id"]))
    moved = good(change(tasks, lease, "commit", offer_id=offer["offer_id"]))["lease"]
    assert sorted(ids(moved)) == ["GPU-n2-0", "GPU-n2-1"]


def test_less_is_given_back_while_the_turns_never_settle(
    tasks: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = submit(tasks, ask("train", gpus=2))["lease"]
    monkeypatch.setattr(Engine, "is_settled", property(lambda engine: False))
    assert len(ids(good(change(tasks, held, "resize", gpus=1))["lease"])) == 1


def test_a_lease_that_may_shrink_takes_what_is_idle_and_hears_what_others_want_back(
    tasks: httpx.Client, lease: dict[str, Any]
) -> None:
    grown = good(change(tasks, lease, "resize", gpus=9, least=1))
    assert (len(ids(grown["lease"])), grown["wanted_back"], grown["request"]["gpus"]) == (4, 0, 4)
    waiting = submit(tasks, ask("two", gpus=2), wait_s=0)["claim_id"]
    told = good(change(tasks, lease, "resize", gpus=9, least=1))
    assert ids(told["lease"]) == ids(grown["lease"]) and told["wanted_back"] in (2, 3)
    left = 4 - told["wanted_back"]
    good(change(tasks, lease, "resize", gpus=left, leave=ids(told["lease"])[left:]))
    body = {"claim_ids": [waiting], "timeout_s": 20}
    (granted,) = tasks.post("/v1/claims/wait", json=body, timeout=30).json()["ready"]
    assert granted["state"] == "granted"
    again = good(change(tasks, lease, "resize", gpus=9, least=1))
    assert (len(ids(again["lease"])), again["wanted_back"]) == (2, 0)
    assert change(tasks, lease, "resize", memory_mib=1, least=1).status_code == 422
