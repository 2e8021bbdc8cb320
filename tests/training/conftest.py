"""Real runs that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.running import Running, make_plan, start


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Return a function that starts a run; none outlives its test."""
    started: list[Running] = []

    def start_one(**changes: Any) -> Running:
        started.append(start(make_plan(tmp_path, **changes)))
        return started[-1]

    yield start_one
    for running in started:
        running.run.kill()
