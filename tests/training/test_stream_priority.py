"""Work goes on a stream of its priority; a driver is not there, so PyTorch's calls to it are noted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.stream_priority import check_priority, prioritised_stream, stream_priority


class Stream:
    """A stream that notes what is done with it."""

    def __init__(self, device: str, priority: int, calls: list[str]) -> None:
        self.name, self.calls = f"{device}@{priority}", calls

    def wait_stream(self, other: Stream) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is asked of the driver of a machine with GPUs, in order."""
    calls: list[str] = []

    @contextmanager
    def current(stream: Any) -> Iterator[None]:
        calls.append(f"current is {stream.name}")
        yield
        calls.append("current is as before")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, 0, calls))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream(device, priority, calls))
    monkeypatch.setattr(torch.cuda, "stream", current)
    return calls


def test_the_block_is_on_a_stream_of_high_priority_in_order_with_what_is_around_it(calls: list[str]) -> None:
    with prioritised_stream() as priority:
        calls.append("work")
    assert priority == -1
    assert calls == [
        "cuda:0@-1 waits for cuda:0@0",
        "current is cuda:0@-1",
        "work",
        "current is as before",
        "cuda:0@0 waits for cuda:0@-1",
    ]


def test_normal_work_stays_on_the_usual_stream(calls: list[str]) -> None:
    with prioritised_stream(0) as priority:
        assert (priority, calls) == (0, [])


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_without_a_gpu_it_says_that_it_has_no_effect(device: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), prioritised_stream(torch_device=device) as priority:
        assert priority == 0
    assert "has no effect" in caplog.text and device in caplog.text


@pytest.mark.parametrize(
    ("asked", "value", "is_shared", "expected"),
    [
        ("auto", 5, True, -1),
        ("auto", 0, True, 0),
        ("auto", 5, False, 0),
        ("normal", 5, True, 0),
        ("high", 0, False, -1),
    ],
)
def test_valuable_work_that_shares_its_device_goes_first(
    asked: Any, value: float, is_shared: bool, expected: int
) -> None:
    assert stream_priority(asked, value=value, is_shared=is_shared) == expected


def test_another_word_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(InvalidRequest, match="'high', 'normal', or 'auto'"):
        check_priority("urgent")
