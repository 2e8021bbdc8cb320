"""The training operator: what it asks for, refuses and returns; and the example DAG on a real broker."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from airflow_gpu_provider.exceptions import InvalidRequest, WorkerGroupFailed
from airflow_gpu_provider.operators.training import DistributedTrainingOperator
from airflow_gpu_provider.operators.training_plan import threads_per_shard
from airflow_gpu_provider.operators.training_result import training_result
from airflow_gpu_provider.operators.training_root import training_root
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.training.failures import FailureCause, ShardFailure
from airflow_gpu_provider.training.run_file import CheckpointRecord, RunRecord, RunState, read_record
from tests.server.conftest import report
from tests.test_task_request import DOCUMENTED
from tests.training.running import ROOT

ENTRYPOINT = "tests.training.entrypoints:train"


def operator(**arguments: Any) -> DistributedTrainingOperator:
    return DistributedTrainingOperator(task_id="train", entrypoint=ENTRYPOINT, **arguments)


# -- what it asks for


def test_the_documented_request_becomes_a_lease_request_with_a_spare() -> None:
    training = operator(task_request=DOCUMENTED)
    request = training.build_request()
    assert (request.gpus, request.models, request.min_tflops) == (2, frozenset({"A100"}), 35)
    assert (request.cpu_cores, request.host_memory_mib, request.spares) == (8, 65536, 1)
    assert training.value == 5


def test_without_a_request_each_gpu_is_a_shard() -> None:
    assert operator(gpus=4).build_request().spares == 1
    assert operator(gpus=4, shard_count=2, redundancy=0.5).build_request().spares == 2, "one of two GPUs"
    assert operator(gpus=4, redundancy=0).build_request().spares == 0


def test_a_training_on_a_range_of_devices_asks_for_the_least_and_for_no_spare_device() -> None:
    for arguments in ({}, {"gpus": 2}):
        training = operator(shard_count=(2, 400), **arguments)
        assert (training.build_request().gpus, training.build_request().spares) == (2, 0)
        assert training.shape(2).shards == 400, "also where the fleet never has as many"
    assert operator(gpus=3, shard_count="2-4").build_request().gpus == 3
    with pytest.raises(InvalidRequest, match="a plain script keeps the number of its ranks"):
        DistributedTrainingOperator(task_id="train", script="/a/train.py", shard_count="2-4")


def test_a_training_on_a_share_has_no_spare_device() -> None:
    request = operator(memory="8GiB", shared=True).build_request()
    assert (request.gpus, request.milli, request.memory_mib, request.spares) == (1, 1, 8192, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"task_request": DOCUMENTED[:100]}, "cut off"),
        ({"task_request": {"task_id": "t"}}, "task_type is missing"),
        ({"gpus": 3, "shard_count": 2}, "3 GPUs cannot be dealt out"),
        ({"shard_count": "two"}, "shard_count='two'"),
        ({"sync_interval": 0}, "sync_interval=0"),
        ({"redundancy": 2}, "redundancy=2"),
        ({"gpus": 0}, "gpus"),
        ({"shard_count": "4-2"}, "the least first"),
        ({"shard_count": (0, 2)}, "from 1 to 4096"),
        ({"gpus": 5, "shard_count": "2-4"}, "set gpus .* to 2"),
        ({"backend": "mpi"}, "backend='mpi': allowed are 'nccl'"),
        ({"allow_non_finite_loss": "maybe"}, "allowed are True and False"),
        ({"checkpoint_every": -1}, "checkpoint_every=-1: allowed is a number of seconds, 0 or more"),
        ({"checkpoint_every": float("nan")}, "checkpoint_every=nan"),
        ({"join_timeout": 0}, "join_timeout=0: allowed is a number of seconds, above 0"),
        ({"seed": "abc"}, "seed='abc': allowed is a whole number"),
        ({"train_params": [1]}, "give names and plain values"),
        ({"train_params": {1: 2}}, "has the key 1, which is no text"),
        ({"train_params": {"f": object()}}, r"train_params\['f'\] is <object .*, a object: allowed are"),
        ({"train_params": {"x": [0, float("nan")]}}, r"train_params\['x'\]\[1\] is nan, which JSON does not"),
        ({"checkpoint_dir": "runs/one"}, "such as '/data/runs/one'"),
        ({"backend": "nccl", "shard_count": "2-4"}, "one rank per GPU"),
        ({"shared": True, "memory": "8GiB", "shard_count": "1-2"}, "whole devices"),
    ],
)
def test_mistakes_are_refused_when_the_dag_is_read(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        operator(**arguments)


def test_an_entrypoint_that_names_no_function_is_refused_when_the_dag_is_read() -> None:
    with pytest.raises(InvalidRequest, match=r"package\.module:function"):
        DistributedTrainingOperator(task_id="train", entrypoint="train.py")


def test_options_that_a_template_renders_to_are_checked_before_devices_are_asked_for() -> None:
    rendered = {"checkpoint_dir": "runs", "train_params": "three steps"}
    for name, value in rendered.items():
        late = operator(checkpoint_dir="{{ var.value.runs }}", train_params="{{ params.rates }}")
        setattr(late, name, value)
        with pytest.raises(InvalidRequest, match=name):
            late.claim_body({})


def test_a_template_is_checked_when_it_is_rendered() -> None:
    training = operator(task_request="{{ dag_run.conf | tojson }}")
    training.task_request = DOCUMENTED.replace('"count": 2', '"count": "two"')
    with pytest.raises(InvalidRequest, match="'two'"):
        training.build_request()


# -- how it ends


@dataclass
class FakeTaskInstance:
    dag_id: str = "dag"
    run_id: str = "manual__2026-01-01T00:00:00+00:00"
    task_id: str = "train"
    map_index: int | None = -1
    try_number: int = 1
    max_tries: int = 0


def context(**changes: Any) -> Any:
    return {"ti": FakeTaskInstance(**changes)}


def record(state: RunState, **fields: Any) -> RunRecord:
    now = datetime.now(timezone.utc)
    return RunRecord(run_id="r", pid=1, state=state, started_at=now, updated_at=now, **fields)


def test_the_xcom_of_a_success_is_small_and_plain_json() -> None:
    checkpoint = CheckpointRecord(step=60, path="/c/step-60.pt", sha256="a", state_sha256="b")
    result = training_result(
        record(RunState.SUCCEEDED, step_count=60, checkpoint=checkpoint, result={"loss": 1.5})
    )
    assert json.loads(json.dumps(result)) == {
        "checkpoint": "/c/step-60.pt",
        "sha256": "a",
        "state_sha256": "b",
        "steps": 60,
        "resumed_from": None,
        "takeovers": [],
        "summary": {"samples_per_s": None, "allreduce_ms": None, "goodput_pct": None, "checkpoints": 0},
        "result": {"loss": 1.5},
    }


def test_a_failure_that_may_pass_is_retried_and_names_its_shards() -> None:
    lost = ShardFailure(uid="u1", rank=1, step=7, cause=FailureCause.KILLED, evidence="ended by SIGKILL")
    with pytest.raises(WorkerGroupFailed, match="no spares left") as error:
        training_result(record(RunState.FAILED, error="no spares left", failures=[lost]))
    assert error.value.failures == {1: "shard 1 (u1) failed at step 7: killed: ended by SIGKILL"}


def test_a_mistake_of_the_author_is_not_retried() -> None:
    with pytest.raises(AirflowFailException, match="KeyError"):
        training_result(record(RunState.FAILED, error="KeyError: price", hopeless=True))


def test_each_task_of_each_run_has_its_own_folder(tmp_path: Path) -> None:
    root = training_root(None, context())
    assert root.parts[-4:] == ("gpu_training", "dag", "manual__2026-01-01T00_00_00+00_00", "train")
    assert training_root(None, context(map_index=3)) == root / "3"
    assert training_root(None, context(map_index=0)) == root / "0"
    assert training_root(str(tmp_path), context()) == tmp_path


def test_shards_share_the_cores_that_were_asked() -> None:
    assert threads_per_shard(1000, None) == 1
    assert threads_per_shard(1, 1) == 1
    assert threads_per_shard(2, "2.0") == 1


# -- the example


@pytest.fixture
def simulated_fleet(broker: Broker) -> None:
    broker.report(ReportBody(nodes=(report(simulated=True),)))


@pytest.mark.usefixtures("simulated_fleet")
@pytest.mark.slow
def test_the_example_fine_tunes_its_model_on_leased_devices(
    dag_test: Callable[..., Any], environment: dict[str, str], broker: Broker, tmp_path: Path
) -> None:
    with_data = {**environment, "LANGUAGE_MODEL_DATA": str(tmp_path / "data")}
    run = dag_test(ROOT / "dags", "fine_tune_language_model", {"sync_interval": 50}, with_data)
    logging.getLogger(__name__).info(run.output)
    assert run.state == "success", run.output[-5000:]
    (root,) = (tmp_path / "dag-test-airflow").rglob("gpu_training/fine_tune_language_model/*/fine_tune")
    outcome = read_record(root / "attempts" / "try-1" / "run.json")
    assert outcome is not None and outcome.state is RunState.SUCCEEDED and outcome.failures == []
    losses: Any = outcome.result
    assert losses["loss_after"] < 0.9 * losses["loss_before"], losses
    assert Path(outcome.checkpoint.path).exists() if outcome.checkpoint else pytest.fail("no checkpoint")
    assert broker.repository.live_leases() == []
    (told,) = broker.runs.newest(9)
    assert (told.task_class, told.model, told.nodes) == (
        "fine_tune_language_model.fine_tune",
        "A100",
        ("n1",),
    )
    assert (told.shards, told.failures, told.work) == (2, 0, None), "a simulated device is as fast as a CPU"
