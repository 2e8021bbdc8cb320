"""Soon, later or never: by the cause of the failure, also when it came out of another process."""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, ExceptionRetryPolicy, RetryAction
from airflow.serialization.serialized_objects import DagSerialization

from airflow_gpu_provider import exceptions
from airflow_gpu_provider.exceptions import (
    BatchIncomplete,
    BrokerUnavailable,
    IdentityRefused,
    InvalidRequest,
    LeaseLost,
    QueueTimeout,
    RequestRejected,
    WorkerGroupFailed,
)
from airflow_gpu_provider.operators.leased import GpuLeasedOperator
from airflow_gpu_provider.operators.training import DistributedTrainingOperator
from airflow_gpu_provider.retry_policy import GpuRetryPolicy

FAIL, SOON, USUAL = RetryAction.FAIL, RetryAction.RETRY, RetryAction.DEFAULT


class _LostNow(LeaseLost):
    """Like the one that a task's own thread meets."""


CASES: list[tuple[BaseException, RetryAction, str]] = [
    (InvalidRequest("gpus=0"), FAIL, "correct the DAG (gpus=0)"),
    (RequestRejected("asked 16, the fleet has 8"), FAIL, "asked 16, the fleet has 8"),
    (IdentityRefused("expired"), FAIL, "airflow gpu token"),
    (WorkerGroupFailed("KeyError", reason="user_error"), FAIL, "correct the code"),
    (WorkerGroupFailed("nan", reason="non_finite"), FAIL, "learning rate"),
    (NameError("name 'modle' is not defined"), FAIL, "correct it"),
    (RuntimeError("CUDA error: device-side assert triggered"), FAIL, "correct the code"),
    (LeaseLost("preempted by claim c9"), SOON, "preempted by claim c9"),
    (_LostNow("not renewed"), SOON, "asks for others"),
    (WorkerGroupFailed("x", reason="gpu_fault"), SOON, "another may do"),
    (WorkerGroupFailed("x", reason="killed"), SOON, "signal from outside"),
    (WorkerGroupFailed("x", reason="broke_off"), SOON, "resumes from the checkpoint"),
    (WorkerGroupFailed("x", reason="node_lost"), SOON, "gets others"),
    (WorkerGroupFailed("x", reason="pod_refused"), SOON, "may get others"),
    (WorkerGroupFailed("x", reason="image"), USUAL, "registry"),
    (WorkerGroupFailed("x", reason="pod_configuration"), FAIL, "pod_override"),
    (RuntimeError("CUDA error: uncorrectable ECC error encountered"), SOON, "another may do"),
    (WorkerGroupFailed("x", reason="out_of_memory"), USUAL, "memory="),
    (WorkerGroupFailed("x", reason="storage"), USUAL, "disk"),
    (WorkerGroupFailed("x", reason="failed"), USUAL, ""),
    (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), USUAL, "memory="),
    (ConnectionResetError("by peer"), USUAL, "network"),
    (QueueTimeout("no GPUs"), USUAL, "queue_timeout"),
    (BrokerUnavailable("no answer"), USUAL, "API server"),
    (BatchIncomplete("3 failed"), USUAL, "only those"),
    (ValueError("the price service said 503"), USUAL, ""),
    (SystemExit("ended from outside"), USUAL, ""),
]


def decide(error: BaseException, try_number: int = 1, policy: GpuRetryPolicy | None = None) -> Any:
    return (policy or GpuRetryPolicy()).evaluate(error, try_number, 3)


@pytest.mark.parametrize(("error", "action", "words"), CASES)
def test_each_failure_has_its_decision_and_a_reason(
    error: BaseException, action: RetryAction, words: str
) -> None:
    decision = decide(error)
    assert decision.action is action
    assert words in (decision.reason or "")
    assert decision.retry_delay == (timedelta(seconds=5) if action is SOON else None)


@pytest.mark.parametrize(("error", "action", "words"), CASES)
def test_an_exception_that_was_pickled_is_judged_alike(
    error: BaseException, action: RetryAction, words: str
) -> None:
    assert decide(pickle.loads(pickle.dumps(error))) == decide(error)


def _fail_in_another_process() -> None:
    raise WorkerGroupFailed("shard 1 failed", reason="gpu_fault", failures={1: "gpu_fault"})


def test_an_exception_out_of_another_process_is_judged_alike() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        error = pool.submit(_fail_in_another_process).exception()
    assert isinstance(error, WorkerGroupFailed)
    assert decide(error).action is SOON


def test_a_class_of_a_reloaded_module_is_known_by_its_name() -> None:
    again = type("LeaseLost", (Exception,), {"__module__": exceptions.__name__})
    assert not issubclass(again, LeaseLost)
    assert decide(again("lost")).action is SOON


def test_what_an_error_was_raised_from_counts_when_it_says_nothing_itself() -> None:
    error = ValueError("my step failed")
    error.__cause__ = LeaseLost("preempted")
    assert decide(error).action is SOON
    error.__cause__.__cause__ = error
    assert decide(error).action is SOON, "also in a ring"


def test_tries_come_later_each_time_and_never_later_than_usual() -> None:
    lost = LeaseLost("lost")
    delays = [decide(lost, number).retry_delay.total_seconds() for number in (1, 2, 3, 4, 5, 50)]
    assert delays == [5, 10, 20, 40, 80, 80]
    impatient: Any = {"task": SimpleNamespace(retry_delay=timedelta(seconds=1))}
    assert GpuRetryPolicy().evaluate(lost, 1, 3, impatient).retry_delay == timedelta(seconds=1)


def test_authors_name_more_that_no_retry_can_mend() -> None:
    policy = GpuRetryPolicy(fail_on=("builtins.KeyError", "TimeoutError"))
    assert decide(KeyError("price"), policy=policy).action is FAIL
    assert decide(TimeoutError(), policy=policy).action is FAIL
    with pytest.raises(InvalidRequest, match="0 seconds or more"):
        GpuRetryPolicy(soon=-1)


def test_it_is_the_same_after_a_round_trip() -> None:
    policy = GpuRetryPolicy(soon=timedelta(minutes=1), fail_on=("KeyError",))
    again = GpuRetryPolicy.deserialize(policy.serialize())
    assert (again.soon, again.fail_on) == (policy.soon, policy.fail_on)


# -- as the default of the operators


def test_tasks_with_gpus_have_it_unless_their_author_says_otherwise() -> None:
    own, everyones = ExceptionRetryPolicy(rules=[]), ExceptionRetryPolicy(rules=[])
    with DAG("d", schedule=None, default_args={"retry_policy": everyones}):
        assert GpuLeasedOperator(task_id="default_args").retry_policy is everyones
    with DAG("d", schedule=None) as dag:
        usual = GpuLeasedOperator(task_id="usual")
        assert GpuLeasedOperator(task_id="own", retry_policy=own).retry_policy is own
        training = DistributedTrainingOperator(task_id="training", entrypoint="a.b:c")
        mapped = GpuLeasedOperator.partial(task_id="mapped").expand(gpus=[1, 2])
    assert isinstance(usual.retry_policy, GpuRetryPolicy)
    assert isinstance(training.retry_policy, GpuRetryPolicy)
    assert isinstance(mapped.unmap({"gpus": 2}).retry_policy, GpuRetryPolicy)
    stored = DagSerialization.deserialize_dag(DagSerialization.serialize_dag(dag))
    assert stored.get_task("usual").has_retry_policy
