"""Questions and answers between hosts, over real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest
from pydantic import ValidationError

from airflow_gpu_provider.echo import (
    SIZE,
    Allowance,
    answer_to,
    answered,
    local_address_towards,
    parse_address,
    question,
    written_address,
)
from airflow_gpu_provider.latency import Latency, Window
from airflow_gpu_provider.reports import NodeReport
from airflow_gpu_provider.wire import wrong_fields

KEY = b"a key of the fleet"
NONCE = b"12345678"


def until(true: Callable[[], object], seconds: float = 20) -> None:
    ends_at = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def test_an_answer_is_as_large_as_its_question_and_only_for_who_knows_the_key() -> None:
    asked = question(KEY, NONCE)
    reply = answer_to(KEY, asked)
    assert reply is not None and len(reply) == len(asked) == SIZE
    assert answered(KEY, reply) == NONCE
    assert answer_to(b"another key", asked) is None
    assert answer_to(KEY, reply) is None, "two hosts cannot be made to answer each other for ever"
    for wrong in (b"", asked[:-1], asked + b"x", asked[:-1] + bytes([asked[-1] ^ 1])):
        assert answer_to(KEY, wrong) is None and answered(KEY, wrong) is None


def test_a_source_gets_only_so_many_answers_a_second() -> None:
    allowance = Allowance(per_source=3)
    assert [allowance.spend("a", 10.1) for _ in range(4)] == [True, True, True, False]
    assert allowance.spend("b", 10.9) and allowance.spend("a", 11.0)


@pytest.mark.parametrize("text", ["10.0.0.5:9339", "[fd00::5]:1"])
def test_an_address_is_read_as_it_is_written(text: str) -> None:
    assert written_address(*parse_address(text)) == text


@pytest.mark.parametrize("text", ["fd00::5", "10.0.0.5", ":1", "h:0", "h:x", "h:70000"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("224.0.0.1:9339", "multicast"),
        ("[ff02::1]:9339", "multicast"),
        ("[::ffff:224.0.0.1]:9339", "multicast"),
        ("255.255.255.255:9339", "broadcast"),
        ("0.0.0.0:9339", "no host"),
        ("[::]:9339", "no host"),
        ("10.0.0.5:53", "ports below 1024"),
        ("victim.example:9339", "not IP:PORT"),
        ("2130706433:9339", "not IP:PORT"),
        ("10.0.0.5", "not IP:PORT"),
    ],
)
def test_a_report_cannot_send_the_fleet_to_what_is_no_hosts_own_address(text: str, told: str) -> None:
    node = {"name": "n", "host": "h", "cpu_cores": 1, "memory_mib": 1}
    with pytest.raises(ValidationError) as refused:
        NodeReport.model_validate({**node, "echo_at": text})
    assert told in wrong_fields(refused.value)
    assert NodeReport.model_validate({**node, "echo_at": "[fd00::5]:9339"}).echo_at == "[fd00::5]:9339"


def test_few_answers_are_no_estimate_and_lost_ones_are_no_zero() -> None:
    window = Window(size=8)
    for sample in (1.0, None, 9.0):
        window.add(sample)
    assert window.estimate() is None
    window.add(1.2)
    estimate = window.estimate()
    assert estimate is not None and (estimate.latency_ms, estimate.loss) == (1.0, 0.25)
    for _ in range(8):
        window.add(None)
    estimate = window.estimate()
    assert estimate is not None and (estimate.latency_ms, estimate.loss) == (None, 1.0)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_peer_is_measured_and_one_that_does_not_answer_is_told_as_such(host: str) -> None:
    assert local_address_towards("127.0.0.1", 80) == "127.0.0.1"
    one, other = Latency(KEY, every_s=0.02), Latency(KEY, every_s=0.02)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        peers = {
            "other": written_address(host, other.port),
            "silent": written_address("127.0.0.1", silent.getsockname()[1]),
            "unnamed": "no-number:1",
        }
        one.ask(peers, KEY)
        try:
            one.start()
            other.start()
            until(lambda: len(one.estimates()) == 2)
            found = one.estimates()
        finally:
            one.stop()
            other.stop()
    assert found["other"].latency_ms is not None and found["other"].latency_ms > 0
    assert (found["silent"].latency_ms, found["silent"].loss) == (None, 1.0)


def test_a_stranger_gets_no_answer() -> None:
    answering = Latency(KEY)
    answering.start()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.settimeout(0.3)
            stranger.sendto(question(b"guessed", NONCE), ("127.0.0.1", answering.port))
            with pytest.raises(TimeoutError):
                stranger.recvfrom(100)
            stranger.sendto(question(KEY, NONCE), ("127.0.0.1", answering.port))
            assert answered(KEY, stranger.recvfrom(100)[0]) == NONCE
    finally:
        answering.stop()
