"""An imitated cluster for each test, and the official client for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kubernetes.imitation import Imitation, running


@pytest.fixture
def cluster() -> Iterator[Imitation]:
    """Run an imitated cluster; its objects are checked by the schemas of one Kubernetes version."""
    with running(schemas="1.34") as started:
        yield started


@pytest.fixture
def core(cluster: Imitation) -> Iterator[Any]:
    """Return the official client of the cluster's core API."""
    from kubernetes import client

    configuration = client.Configuration(host=cluster.url)
    with client.ApiClient(configuration) as connected:
        yield client.CoreV1Api(connected)
