"""The trainings of `entrypoints`, each shard on a host of its own: a namespace that its slot names."""

from __future__ import annotations

import os
from typing import Any

from tests.training import entrypoints
from tests.training.namespaces import VARIABLE, enter


def train(ctx: Any) -> dict[str, Any]:
    """Go to the shard's host before the loop: there the shards connect. The store was reached before."""
    enter(os.environ[VARIABLE])
    return entrypoints.train(ctx)
