from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone

import httpx
import pytest

from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.triggers.lease import LeaseTrigger
from tests.hooks.test_broker_hook import connect
from tests.server.conftest import ask
from tests.stored_rows import pending


async def first_event(trigger: LeaseTrigger) -> dict[str, str]:
    async for event in trigger.run():
        payload: dict[str, str] = event.payload
        return payload
    raise AssertionError("the trigger ended without an event")


@pytest.fixture(autouse=True)
def connected(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, base_url)


def test_it_can_be_rebuilt_from_plain_values() -> None:
    path, kwargs = LeaseTrigger("c", "gpu_default", 10.0, "2026-11-30T12:00:00+00:00").serialize()
    assert path == "airflow_gpu_provider.triggers.lease.LeaseTrigger"
    assert LeaseTrigger(**kwargs).serialize() == (path, kwargs)


def test_it_fires_when_the_claim_is_decided(broker: Broker) -> None:
    granted = ask(broker, "one", gpus=2)
    rejected = ask(broker, "nine", gpus=9)

    async def both() -> list[dict[str, str]]:
        return await asyncio.gather(
            *(first_event(LeaseTrigger(claim_id, "gpu_default")) for claim_id in (granted, rejected))
        )

    assert asyncio.run(both()) == [
        {"claim_id": granted, "why": "granted"},
        {"claim_id": rejected, "why": "rejected"},
    ]


def test_it_fires_at_the_deadline_while_the_claim_still_waits(broker: Broker) -> None:
    ask(broker, "one", gpus=2)
    waiting = ask(broker, "two", gpus=2)
    soon = (datetime.now(timezone.utc) + timedelta(seconds=0.5)).isoformat()
    event = asyncio.run(first_event(LeaseTrigger(waiting, "gpu_default", None, soon)))
    assert event == {"claim_id": waiting, "why": "deadline"}
    assert [row.id for row in pending(broker.repository)] == [waiting], "the task decides, not the trigger"


def test_an_unknown_claim_wakes_its_task_and_disturbs_no_other(broker: Broker) -> None:
    known = ask(broker, "one", gpus=2)

    async def both() -> list[dict[str, str]]:
        return await asyncio.gather(
            first_event(LeaseTrigger("nonsense", "gpu_default")),
            first_event(LeaseTrigger(known, "gpu_default")),
        )

    bad, good = asyncio.run(both())
    assert bad["why"] == "unknown_claim"
    assert good == {"claim_id": known, "why": "granted"}


def test_many_waiting_tasks_share_one_request(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = ask(broker, "holder", gpus=2)
    waiting = [ask(broker, f"w{i}") for i in range(40)]
    open_now = most = 0
    send = httpx.AsyncClient.send

    async def counted(self: httpx.AsyncClient, *args: object, **kwargs: object) -> httpx.Response:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        try:
            return await send(self, *args, **kwargs)  # type: ignore[arg-type]
        finally:
            open_now -= 1

    monkeypatch.setattr(httpx.AsyncClient, "send", counted)

    async def wait_for_two() -> set[str]:
        tasks = [asyncio.create_task(first_event(LeaseTrigger(w, "gpu_default"))) for w in waiting]
        await asyncio.sleep(0.5)
        await broker.cancel(holder)
        done: set[str] = set()
        for next_done in asyncio.as_completed(tasks):
            done.add((await next_done)["claim_id"])
            if len(done) == 2:
                break
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return done

    granted = asyncio.run(wait_for_two())
    assert len(granted) == 2
    assert most == 1


def test_a_person_who_ends_the_deferred_task_withdraws_its_claim(broker: Broker) -> None:
    ask(broker, "one", gpus=2)
    waiting = ask(broker, "two")
    asyncio.run(LeaseTrigger(waiting, "gpu_default").on_kill())
    assert pending(broker.repository) == []


def test_a_restart_of_the_triggerer_keeps_the_claim(broker: Broker) -> None:
    ask(broker, "one", gpus=2)
    waiting = ask(broker, "two")

    async def restart() -> None:
        trigger = LeaseTrigger(waiting, "gpu_default")
        task = asyncio.create_task(first_event(trigger))
        await asyncio.sleep(0.3)
        task.cancel()
        await trigger.cleanup()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(restart())
    assert [row.id for row in pending(broker.repository)] == [waiting]


def test_waiting_goes_on_while_the_broker_restarts(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, base_url: str
) -> None:
    claim_id = ask(broker, "one")
    monkeypatch.setattr("airflow_gpu_provider.triggers.lease._AGAIN_S", 0.2)
    connect(monkeypatch, "http://127.0.0.1:9")
    hook_init = GpuBrokerHook.__init__
    monkeypatch.setattr(
        GpuBrokerHook, "__init__", lambda self, conn_id: hook_init(self, conn_id, patience_s=0.2)
    )

    async def outage() -> dict[str, str]:
        task = asyncio.create_task(first_event(LeaseTrigger(claim_id, "gpu_default")))
        await asyncio.sleep(0.6)
        assert not task.done(), "an outage of the broker must not end the task"
        connect(monkeypatch, base_url)
        return await asyncio.wait_for(task, 10)

    assert asyncio.run(outage())["why"] == "granted"


def test_tasks_that_join_all_the_time_do_not_keep_the_others_from_hearing(broker: Broker) -> None:
    holder = ask(broker, "holder", gpus=2)
    waiting = [ask(broker, f"w{i}") for i in range(60)]

    async def storm() -> dict[str, str]:
        first = asyncio.create_task(first_event(LeaseTrigger(waiting[0], "gpu_default")))
        await asyncio.sleep(0.3)
        others = []
        for claim_id in waiting[1:]:  # a new one every 20 ms, for longer than an answer takes
            others.append(asyncio.create_task(first_event(LeaseTrigger(claim_id, "gpu_default"))))
            await asyncio.sleep(0.02)
            if len(others) == 10:
                await broker.cancel(holder)
        heard = first.done()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert heard, "it must not wait until the storm is over"
        return await first

    assert asyncio.run(storm())["why"] == "granted"


def test_a_task_that_joins_while_the_last_one_leaves_is_answered(broker: Broker) -> None:
    granted = [ask(broker, f"t{i}") for i in range(2)]

    async def in_turn() -> list[str]:
        return [
            (await asyncio.wait_for(first_event(LeaseTrigger(claim_id, "gpu_default")), 20))["why"]
            for claim_id in granted * 10
        ]

    assert set(asyncio.run(in_turn())) == {"granted"}
