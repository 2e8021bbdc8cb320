"""The lease lifecycle of a task: by `dag.test()` in a real Airflow process, against a served broker."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.operators.leased import GpuLeasedOperator
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.store.tables import claim
from tests.server.conftest import ask
from tests.stored_rows import pending

DAGS = Path(__file__).parent / "dags"


def test_tasks_get_their_devices_and_give_them_back(
    dag_test: Callable[..., Any], environment: dict[str, str], broker: Broker
) -> None:
    run = dag_test(DAGS, "leased_tasks", environment=environment)
    assert "'devices': ['GPU-n1-" in run.output
    assert "'order': 'PCI_BUS_ID'" in run.output
    assert "SEEN retried 2" in run.output
    assert "SEEN share {'milli': [200], 'limit': '8192', 'same': '8192'}" in run.output, "8 of 40 GiB"
    assert run.tasks["templated[0]"] == run.tasks["templated[1]"] == "success"
    assert "['GPU-n1-0', 'GPU-n1-1']" in run.output, "a template renders to a number"
    assert broker.repository.live_leases() == []
    assert pending(broker.repository) == []

    with broker.engine.connect() as connection:
        told = select(claim.c.task_id, claim.c.completes).where(claim.c.try_number == 1)
        completes = dict(connection.execute(told).all())
    last = {completes[name] for name in ("too_many", "unknown_model", "impatient")}
    assert 0 < completes["environment"] < min(last) and max(last) == 1, (
        f"what comes last completes the run: {completes}"
    )

    # What can never run fails at once, without one of its retries.
    assert run.tasks["too_many"] == run.tasks["unknown_model"] == "failed"
    assert "asked 16" in run.output.lower() and "[exceeds_fleet]" in run.output
    assert "Z9000" in run.output and "[unknown_model]" in run.output
    assert run.tasks["impatient"] == "success"


def test_a_task_that_must_wait_is_deferred_and_resumes_with_its_devices(
    dag_test: Callable[..., Any], environment: dict[str, str], broker: Broker
) -> None:
    holder = ask(broker, "holder", gpus=2)

    def release_when_it_waits() -> None:
        deadline = time.monotonic() + 60
        while not any(c.id != holder for c in pending(broker.repository)) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(2)
        asyncio.run(broker.cancel(holder))

    thread = threading.Thread(target=release_when_it_waits)
    thread.start()
    run = dag_test(DAGS, "waiting_task", environment=environment)
    thread.join()
    assert run.state == "success"
    assert "Pausing task as DEFERRED" in run.output
    assert "SEEN work ['GPU-n1-0', 'GPU-n1-1']" in run.output


def test_a_broker_that_is_down_is_a_clear_error(
    dag_test: Callable[..., Any], environment: dict[str, str]
) -> None:
    connection = json.loads(environment["AIRFLOW_CONN_GPU_DEFAULT"]) | {"host": "http://127.0.0.1:9"}
    down = {**environment, "AIRFLOW_CONN_GPU_DEFAULT": json.dumps(connection)}
    run = dag_test(DAGS, "waiting_task", environment=down)
    assert run.tasks == {"work": "failed"}
    assert "The GPU broker at http://127.0.0.1:9/gpu" in run.output
    assert "Check that the API server runs" in run.output


@pytest.mark.parametrize("gpus", [0, -1, 1.5, "two", None, True])
def test_wrong_numbers_of_devices_are_refused_when_the_dag_is_read(gpus: Any) -> None:
    with pytest.raises(InvalidRequest, match="gpus"):
        GpuLeasedOperator(task_id="t", gpus=gpus)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"queue_timeout": float("nan")}, "queue_timeout=nan: allowed are seconds of 0 or more"),
        ({"queue_timeout": timedelta(seconds=-1)}, "allowed are seconds of 0 or more or a timedelta"),
        ({"queue_timeout": 1e300}, "longer than time is counted"),
        ({"value": "high"}, "value='high' is not a number"),
        ({"value": float("inf")}, "value=inf is not a number"),
        ({"team": "x" * 5000}, "has 5000 characters; allowed are 250"),
        ({"team": 5}, "team=5 is no name"),
        ({"artifacts": "relative/path"}, "neither an absolute path nor a digest"),
        ({"artifacts": ["/data/gpt2", "gpt2"]}, "'gpt2' is neither an absolute path nor a digest"),
        ({"model": ""}, "model='' names no GPU model: write 'A100'"),
        ({"model": []}, "leave it out for any model"),
    ],
)
def test_what_can_never_be_meant_is_refused_when_the_dag_is_read(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        GpuLeasedOperator(task_id="t", **arguments)


def test_what_leaves_a_wish_out_or_names_it_well_is_taken() -> None:
    GpuLeasedOperator(task_id="t", queue_timeout=0, value="120", team="", artifacts=["sha256:ab", "/m"])
    GpuLeasedOperator(task_id="t", model="{{ params.model }}", artifacts="{{ params.artifact }}").model = ""


def test_wrong_memory_is_refused_when_the_dag_is_read() -> None:
    with pytest.raises(InvalidRequest, match="8GiB"):
        GpuLeasedOperator(task_id="t", memory="8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"shared": True}, "how much"),
        ({"share": 25}, "share=0.25"),
        ({"share": 0}, "more than 0"),
        ({"share": "half"}, "not a number"),
        ({"shared": "perhaps"}, "neither True nor False"),
        ({"shared": True, "memory": "8GiB", "gpus": 2}, "several tasks of gpus=1"),
        ({"share": 0.5, "spares": 1}, "leave spares out"),
        ({"share": 0.5, "strict": True, "min_tflops": 10}, "leave strict out"),
        ({"shared": True, "memory": "100MiB"}, "512MiB or more"),
    ],
)
def test_what_cannot_be_shared_is_refused_when_the_dag_is_read(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        GpuLeasedOperator(task_id="t", **arguments)


def test_a_template_is_checked_when_it_is_rendered() -> None:
    operator = GpuLeasedOperator(task_id="t", gpus="{{ params.n }}")
    operator.gpus = "two"
    with pytest.raises(InvalidRequest, match="two"):
        operator.build_request()
