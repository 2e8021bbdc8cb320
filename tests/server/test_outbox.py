from __future__ import annotations

import asyncio
import threading

import pytest

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.server.board import Entry
from airflow_gpu_provider.server.clock import utc_now
from airflow_gpu_provider.server.crowd import Crowd
from airflow_gpu_provider.server.outbox import Expected, Outbox

from .test_hard_cases import body


def entry(name: str) -> Entry:
    return Entry(name, body(name), utc_now())


def in_thread(act: object) -> None:
    thread = threading.Thread(target=act)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def test_answers_of_another_thread_reach_their_coroutines() -> None:
    async def ask() -> list[str]:
        outbox = Outbox(asyncio.get_running_loop())
        expected = [outbox.expect() for _ in range(3)]

        def answer() -> None:
            for number, each in enumerate(expected):
                assert each.set_running_or_notify_cancel()
                each.set_result(entry(f"c{number}"))

        in_thread(answer)
        assert all(each.done() for each in expected)
        first = [(await each.future).claim_id for each in expected]
        later = outbox.expect()
        in_thread(lambda: later.set_exception(InvalidRequest("no such thing")))
        with pytest.raises(InvalidRequest, match="no such thing"):
            await asyncio.wait_for(later.future, 10)
        return first

    assert asyncio.run(ask()) == ["c0", "c1", "c2"]


def test_a_request_that_was_called_off_is_not_begun_and_one_that_was_begun_goes_on() -> None:
    async def ask() -> tuple[Expected, Expected]:
        outbox = Outbox(asyncio.get_running_loop())
        early, late = outbox.expect(), outbox.expect()
        early.future.cancel()
        assert early.done() and not early.set_running_or_notify_cancel()
        assert late.set_running_or_notify_cancel()
        late.future.cancel()
        assert late.running() and not late.done()
        late.set_result(entry("c"))
        await asyncio.sleep(0)
        return early, late

    early, late = asyncio.run(ask())
    assert early.future.cancelled() and late.future.cancelled() and late.done()


def test_an_answer_after_the_loop_closed_is_dropped() -> None:
    async def ask() -> Expected:
        return Outbox(asyncio.get_running_loop()).expect()

    expected = asyncio.run(ask())
    expected.set_result(entry("c"))
    assert expected.done()


def test_a_crowd_is_waited_for_and_one_alone_is_not() -> None:
    queue = ["alone"]
    crowd = Crowd(queue)
    waited: list[int] = []
    crowd.gather(lambda _s: waited.append(crowd.awaited))
    assert not waited
    queue.extend("abc")
    crowd.gather(lambda _s: waited.append(crowd.awaited))
    del queue[1:]
    crowd.gather(lambda _s: waited.append(crowd.awaited))
    assert waited == [4] and crowd.awaited == 1
    for _ in range(50):
        crowd.gather(lambda _s: None)
    waited.clear()
    crowd.gather(lambda _s: waited.append(crowd.awaited))
    assert not waited, "a crowd that left is forgotten"
