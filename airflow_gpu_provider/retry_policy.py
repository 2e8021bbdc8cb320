"""When a failed GPU task is tried again: at once, at its usual delay, or never.

What the DAG's author or the fleet must change fails without retries; what other devices mend is tried again
within seconds, later each time; all else keeps the task's own delay. An exception is known by the names of
its classes, so that one that came out of another process or a reloaded module is known too. Consulted by
Airflow in the worker, so never for a killed process: that is retried as usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import RetryAction, RetryDecision, RetryPolicy

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.failures import FailureCause, cause_of

if TYPE_CHECKING:
    from airflow.sdk import Context

_FAIL = {
    "InvalidRequest": "an argument is wrong whatever the fleet looks like; correct the DAG",
    "ManifestInvalid": "the product catalogue cannot be read as one; correct the file",
    "RequestRejected": "the whole fleet can never serve this request; lower it or add nodes",
    "IdentityRefused": "the broker refuses this token; mint another one (airflow gpu token)",
    "SyntaxError": "the code itself is wrong; correct it",
    "NameError": "the code itself is wrong; correct it",
    "NotImplementedError": "the code itself is unfinished; complete it",
}
_SOON = {"LeaseLost": "the devices were taken back or their lease ended; another try asks for others at once"}
_USUAL = {
    "QueueTimeout": "the fleet is busy; raise queue_timeout, ask for less or add nodes",
    "BrokerUnavailable": "the broker did not answer; look at the API server",
    "ArtifactIncomplete": "a model or data set is not complete yet; wait for it with an ArtifactSensor",
    "FolderInUse": "another training writes into its checkpoint_dir; give each its own",
    "BatchIncomplete": "some products failed; the next try does only those",
}
#: by the reason of a training that failed, and by the cause that another exception tells
_CAUSES = {
    FailureCause.USER_ERROR.value: (RetryAction.FAIL, "it would come back in every try; correct the code"),
    FailureCause.NON_FINITE.value: (RetryAction.FAIL, "lower the learning rate or look for bad samples"),
    FailureCause.GPU_FAULT.value: (RetryAction.RETRY, "a device or its driver failed, another may do"),
    FailureCause.KILLED.value: (RetryAction.RETRY, "a signal from outside ended it (preempted, drained?)"),
    FailureCause.HUNG.value: (RetryAction.RETRY, "a shard hung; the next try resumes from the checkpoint"),
    "broke_off": (RetryAction.RETRY, "the supervisor was lost; the next try resumes from the checkpoint"),
    FailureCause.OUT_OF_MEMORY.value: (RetryAction.DEFAULT, "ask for more: memory=..., host_memory=..."),
    FailureCause.NETWORK.value: (RetryAction.DEFAULT, "check the network between the nodes"),
    FailureCause.STORAGE.value: (RetryAction.DEFAULT, "make room on the disk, or make it writable"),
    "evicted": (RetryAction.RETRY, "its node was drained or short of memory; other nodes may do"),
    "pod_preempted": (RetryAction.RETRY, "a pod of higher priority took its place"),
    "node_lost": (RetryAction.RETRY, "its node was lost; another try gets others"),
    "pod_refused": (RetryAction.RETRY, "its node did not take the pod; another try may get others"),
    "pod_deleted": (RetryAction.RETRY, "someone deleted a pod"),
    "pod_configuration": (RetryAction.FAIL, "correct command, secrets or pod_override"),
    "image": (RetryAction.DEFAULT, "correct the image's name, or the registry's access"),
    "unschedulable": (RetryAction.DEFAULT, "look for what the broker does not see: quotas, other schedulers"),
    "not_started": (RetryAction.DEFAULT, "raise start_timeout, or look at the node's kubelet"),
    FailureCause.CRASHED.value: (RetryAction.DEFAULT, "native code ended a shard; see its last lines"),
}
_MOST_DOUBLINGS = 4


class GpuRetryPolicy(RetryPolicy):
    """
    Decide by the cause of a failure; the default of operators that hold GPUs.

    It never retries more often than the task's ``retries``, and never later than its ``retry_delay``.

    :param soon: seconds or timedelta until a try that other devices may mend; doubled from try to try, up to
        sixteenfold
    :param fail_on: more exceptions that no retry can mend: class names, with or without their module
    """

    def __init__(self, *, soon: timedelta | float = 5.0, fail_on: tuple[str, ...] = ()) -> None:
        self.soon = soon if isinstance(soon, timedelta) else timedelta(seconds=soon)
        if self.soon < timedelta(0):
            raise InvalidRequest(f"GpuRetryPolicy(soon={soon!r}): allowed are 0 seconds or more.")
        self.fail_on = tuple(fail_on)

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,
        max_tries: int,
        context: Context | None = None,
    ) -> RetryDecision:
        """Return the decision for this failure, with a reason that says what would help."""
        for error in _with_causes(exception):
            action, advice = self._judge(error)
            if advice:
                said = " ".join(str(error).split())[:200]
                reason = f"{type(error).__name__}: {advice} ({said})" if said else advice
                delay = self._delay(try_number, context) if action is RetryAction.RETRY else None
                return RetryDecision(action=action, retry_delay=delay, reason=reason)
        return RetryDecision.default()

    def _judge(self, error: BaseException) -> tuple[RetryAction, str]:
        names = _names(error)
        if names.intersection(self.fail_on):
            return RetryAction.FAIL, "the task's fail_on names it as one that no retry can mend"
        tables = ((RetryAction.FAIL, _FAIL), (RetryAction.RETRY, _SOON), (RetryAction.DEFAULT, _USUAL))
        for action, table in tables:
            if found := next((advice for name, advice in table.items() if name in names), None):
                return action, found
        if "WorkerGroupFailed" in names:
            return _CAUSES.get(getattr(error, "reason", ""), (RetryAction.DEFAULT, ""))
        cause = cause_of(error)
        if cause is FailureCause.USER_ERROR and "device-side assert" not in str(error):
            return RetryAction.DEFAULT, ""  # it may as well be a service that does not answer
        return _CAUSES[cause.value]

    def _delay(self, try_number: int, context: Context | None) -> timedelta:
        delay = self.soon * 2 ** min(max(try_number, 1) - 1, _MOST_DOUBLINGS)
        task = None if context is None else context.get("task")
        usual = getattr(task, "retry_delay", None)
        return min(delay, usual) if isinstance(usual, timedelta) else delay

    def serialize(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"soon": self.soon.total_seconds(), "fail_on": list(self.fail_on)}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> GpuRetryPolicy:
        """Return what `serialize` was called for."""
        return cls(soon=data["soon"], fail_on=tuple(data["fail_on"]))


def _with_causes(exception: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from, the outermost first."""
    error: BaseException | None = exception
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _names(error: BaseException) -> set[str]:
    """Return the names of its classes, short and with their modules."""
    classes = type(error).__mro__
    return {name for each in classes for name in (each.__name__, f"{each.__module__}.{each.__name__}")}
