"""Why a pod failed, by what its status says: codes and reasons, never the text of a message.

Pure, so that each row can be tried against the statuses that kubelets write. The cause decides whether a
retry may help (`retry_policy`); its sentence names what was seen. The next step is `pod_gang`, which ends a
gang at the first failure.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

Object = Mapping[str, Any]

_SIGNALLED = 128
_KILLS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class PodCause(str, Enum):
    """What ended a pod, or keeps it from running."""

    OUT_OF_MEMORY = "out_of_memory"
    """A container used more memory than its limit, or than its node had."""
    EVICTED = "evicted"
    """The node was short of something, or a person drained it."""
    PREEMPTED = "pod_preempted"
    """Kubernetes took its place for a pod of higher priority."""
    NODE_LOST = "node_lost"
    """The node was not heard of any more, or was deleted."""
    REFUSED = "pod_refused"
    """The node did not take the pod: a device is unhealthy, or someone else was first."""
    DELETED = "pod_deleted"
    """Someone deleted the pod."""
    IMAGE = "image"
    """The image cannot be pulled."""
    CONFIGURATION = "pod_configuration"
    """The container cannot be started as it is written: a missing secret, a wrong command."""
    UNSCHEDULABLE = "unschedulable"
    """Kubernetes found no room on the leased node."""
    NOT_STARTED = "not_started"
    """It did not run in time, without a reason that its status tells."""
    KILLED = "killed"
    """A signal from outside ended it."""
    CRASHED = "crashed"
    """The program ended by a signal of its own making, or with an exit code other than 0."""


_DISRUPTIONS = {
    "PreemptionByScheduler": PodCause.PREEMPTED,
    "DeletionByTaintManager": PodCause.NODE_LOST,
    "DeletionByPodGC": PodCause.NODE_LOST,
    "EvictionByEvictionAPI": PodCause.EVICTED,
    "TerminationByKubelet": PodCause.EVICTED,
}
_POD_REASONS = {
    "Evicted": PodCause.EVICTED,
    "Preempting": PodCause.PREEMPTED,
    "NodeLost": PodCause.NODE_LOST,
    "NodeShutdown": PodCause.EVICTED,
    "Terminated": PodCause.EVICTED,
    "Shutdown": PodCause.EVICTED,
    "UnexpectedAdmissionError": PodCause.REFUSED,
    "NodeAffinity": PodCause.REFUSED,
    "DeadlineExceeded": PodCause.KILLED,
}
#: what no waiting mends
_HOPELESS_WAITS = {
    "InvalidImageName": PodCause.IMAGE,
    "ErrImageNeverPull": PodCause.IMAGE,
    "CreateContainerConfigError": PodCause.CONFIGURATION,
}
_WAITS = {
    **_HOPELESS_WAITS,
    "ErrImagePull": PodCause.IMAGE,
    "ImagePullBackOff": PodCause.IMAGE,
    "CreateContainerError": PodCause.CONFIGURATION,
    "RunContainerError": PodCause.CONFIGURATION,
}
_START_ERRORS = frozenset({"StartError", "ContainerCannotRun"})


@dataclass(frozen=True, slots=True)
class PodFailure:
    """Why a pod failed."""

    cause: PodCause
    evidence: str


def failure_of(pod: Object, *, is_late: bool) -> PodFailure | None:
    """Return why a pod failed or never will run, None while it may; ``is_late``: it should run by now."""
    status = pod.get("status") or {}
    is_ending = status.get("phase") == "Failed" or "deletionTimestamp" in pod["metadata"]
    disrupted = _condition(pod, "DisruptionTarget")
    cause = _DISRUPTIONS.get(disrupted.get("reason", "")) if disrupted.get("status") == "True" else None
    if is_ending and cause is not None:
        return PodFailure(cause, _words(disrupted))
    if "deletionTimestamp" in pod["metadata"]:
        return PodFailure(PodCause.DELETED, "someone deleted the pod")
    if status.get("phase") == "Failed":
        return _failed(pod, status)
    if status.get("phase") == "Pending":
        return _waiting(pod, is_late=is_late)
    return None


def _failed(pod: Object, status: Object) -> PodFailure:
    reason = status.get("reason") or ""
    if reason.startswith("OutOf"):  # OutOfcpu, OutOfnvidia.com/gpu
        return PodFailure(PodCause.REFUSED, _words(status))
    if reason in _POD_REASONS:
        return PodFailure(_POD_REASONS[reason], _words(status))
    ended = [state["terminated"] for _, state in _states(pod) if "terminated" in state]
    bad = [each for each in ended if each.get("exitCode")]
    worst = next((each for each in bad if each.get("reason") == "OOMKilled"), bad[0] if bad else None)
    if worst is None:
        return PodFailure(PodCause.CRASHED, _words(status) if reason else "the pod failed without a reason")
    return _ended(worst)


def _ended(terminated: Object) -> PodFailure:
    code, reason = int(terminated["exitCode"]), terminated.get("reason")
    if reason == "OOMKilled":
        return PodFailure(PodCause.OUT_OF_MEMORY, f"OOMKilled (exit code {code}): raise host_memory")
    if reason in _START_ERRORS:
        return PodFailure(PodCause.CONFIGURATION, _words(terminated))
    if code > _SIGNALLED:
        try:
            number = signal.Signals(code - _SIGNALLED)
        except ValueError:
            return PodFailure(PodCause.CRASHED, f"exit code {code}")
        cause = PodCause.KILLED if number in _KILLS else PodCause.CRASHED
        return PodFailure(cause, f"ended by {number.name} (exit code {code})")
    return PodFailure(PodCause.CRASHED, f"exit code {code}")


def _waiting(pod: Object, *, is_late: bool) -> PodFailure | None:
    waits = [(name, state["waiting"]) for name, state in _states(pod) if "waiting" in state]
    known = _WAITS if is_late else _HOPELESS_WAITS
    for name, wait in waits:
        if wait.get("reason") in known:
            return PodFailure(known[wait["reason"]], f"container {name}: {_words(wait)}")
    if not is_late:
        return None
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return PodFailure(PodCause.UNSCHEDULABLE, _words(scheduled))
    told = ", ".join(f"container {name}: {_words(wait)}" for name, wait in waits)
    return PodFailure(PodCause.NOT_STARTED, told or "no kubelet has taken it")


def _states(pod: Object) -> Iterator[tuple[str, Object]]:
    status = pod.get("status") or {}
    for kind in ("initContainerStatuses", "containerStatuses"):
        for each in status.get(kind) or ():
            yield each["name"], each.get("state") or {}


def _condition(pod: Object, kind: str) -> Object:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each.get("type") == kind), {})


def _words(told: Object) -> str:
    """Return reason and message, for people."""
    parts = (str(told.get(name) or "") for name in ("reason", "message"))
    return ": ".join(part for part in parts if part)[:300]
