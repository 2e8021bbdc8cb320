"""Work whose devices are taken back, in real Airflow processes against a served broker."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.wire import ClaimState
from tests.server.conftest import ask, look
from tests.stored_rows import pending

DAGS = Path(__file__).parent / "dags"
TASKS = ("stays", "leaves", "is_deaf")


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Return settings by which devices are taken back at once, and holders hear of it within a second."""
    changes = {"preemption_least_runtime_s": 0.0, "preemption_grace_s": 6.0, "lease_ttl_s": 3.0}
    return settings.model_copy(update=changes)


def preempt(broker: Broker, saves: Path) -> None:
    """While each task works, ask for its devices, hold them for a while, and give them back."""
    for name in TASKS:
        began = saves / f"{name}.began"
        deadline = time.monotonic() + 90
        while not began.exists():
            assert time.monotonic() < deadline, f"{name} never began"
            time.sleep(0.1)
        urgent = ask(broker, f"before {name}", gpus=2, value=99.0)
        assert look(broker, urgent, "granted", 30).state is ClaimState.GRANTED
        asyncio.run(broker.collect(urgent))
        time.sleep(1)
        asyncio.run(broker.cancel(urgent))


def test_preempted_tasks_wait_for_their_claim_again_and_go_on_within_their_only_try(
    dag_test: Callable[..., Any], environment: dict[str, str], broker: Broker, tmp_path: Path
) -> None:
    """pytorch/torchx#394: preemption must not use up the retries of the user."""
    saves = tmp_path / "saves"
    saves.mkdir()
    others = threading.Thread(target=preempt, args=(broker, saves))
    others.start()
    run = dag_test(DAGS, "preempted_tasks", environment={**environment, "PREEMPTED_SAVES": str(saves)})
    others.join(30)
    assert run.state == "success", run.output[-5000:]
    for name in TASKS:
        assert f"SEEN {name} run 0" in run.output and f"SEEN {name} run 1" in run.output
    assert run.output.count("taken back for claim") >= len(TASKS)
    assert "Pausing task as DEFERRED" in run.output, "one of them waits in the triggerer"
    assert broker.repository.live_leases() == [] and pending(broker.repository) == []
    with broker.engine.connect() as connection:
        told = connection.exec_driver_sql(
            "SELECT c.task_id, c.try_number, c.preemptions, l.end_reason FROM gpu_lease l "
            "JOIN gpu_claim c ON c.id = l.claim_id WHERE c.task_id IN ('stays', 'leaves', 'is_deaf') "
            "ORDER BY l.granted_at"
        ).all()
    assert [tuple(row) for row in told] == [
        (name, 1, 1, how) for name in TASKS for how in ("preempted", "released")
    ]
