"""Start the pods of a gang together, follow them, end them: nothing of a gang is left behind.

What an earlier try of the task started under the same lease is adopted, if none of it has failed; what runs
under another lease is deleted first. A pod's failure ends all, since the others can only wait for it. The
truth is the cluster's: names follow from the lease, so a call that got no answer can be repeated.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from airflow_gpu_provider.exceptions import WorkerGroupFailed
from airflow_gpu_provider.kubernetes.api import ClusterApi
from airflow_gpu_provider.kubernetes.gang import Gang, Member, pinned, pod_body, service_body
from airflow_gpu_provider.kubernetes.names import LEASE_LABEL, TASK_LABEL
from airflow_gpu_provider.kubernetes.pod_failures import PodCause, PodFailure, failure_of
from airflow_gpu_provider.kubernetes.pod_log import PodLog, log_errors
from airflow_gpu_provider.kubernetes.watch import Watcher

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, CoreV1Api

T = TypeVar("T")

_AT_ONCE = 16
_PATIENCE_S = 60.0
_SHORT_PATIENCE_S = 5.0
_LOOK_EVERY_S = 1.0
_TAIL_LINES = 20
#: Never 0, which would take a pod off the books before its node says that its processes are gone.
_LEAST_GRACE_S = 1

log = logging.getLogger(__name__)

#: makes of a pod what its author wants, before it is pinned
Override = Callable[[dict[str, Any]], dict[str, Any]]


class Pods:
    """The pods of a gang, as a watch tells them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pods: dict[str, dict[str, Any]] = {}
        self.changed = threading.Event()

    def replace(self, objects: list[dict[str, Any]]) -> None:
        """Take all pods."""
        with self._lock:
            self._pods = {each["metadata"]["name"]: each for each in objects}
        self.changed.set()

    def put(self, each: dict[str, Any]) -> None:
        """Take a pod."""
        with self._lock:
            self._pods[each["metadata"]["name"]] = each
        self.changed.set()

    def remove(self, each: dict[str, Any]) -> None:
        """Forget a pod."""
        with self._lock:
            self._pods.pop(each["metadata"]["name"], None)
        self.changed.set()

    def by_name(self) -> dict[str, dict[str, Any]]:
        """Return all that there are now."""
        with self._lock:
            return dict(self._pods)


class PodGang:
    """The pods of one lease in one namespace."""

    def __init__(
        self, client: ApiClient, namespace: str, gang: Gang, *, override: Override, start_s: float
    ) -> None:
        from kubernetes.client import CoreV1Api

        self._core = CoreV1Api(client)
        self._namespace = namespace
        self._gang = gang
        self._override = override
        self._start_s = start_s
        self._pods = Pods()
        path = f"/api/v1/namespaces/{namespace}/pods"
        self._watcher = Watcher(ClusterApi(client), path, self._pods, labels=f"{LEASE_LABEL}={gang.lease}")

    @contextmanager
    def running(self, grace_s: Callable[[], float]) -> Iterator[PodGang]:
        """Start or adopt the pods; end them in any case, with as much grace as there is then."""
        self._delete(f"{TASK_LABEL}={self._gang.task},{LEASE_LABEL}!={self._gang.lease}")
        try:
            with _refusals_told():
                self._start()
            self._watcher.start()
            yield self
        finally:
            self.end(grace_s=grace_s())
            self._watcher.stop()

    def follow(self, look: Callable[[], None]) -> None:
        """Return when all pods have succeeded; raise WorkerGroupFailed at the first failure.

        ``look`` is called at least once a second, and may raise.
        """
        begun = time.monotonic()
        while True:
            self._pods.changed.clear()
            look()
            is_late = time.monotonic() - begun > self._start_s
            if not self._watcher.listed.is_set() and not is_late:
                self._pods.changed.wait(_LOOK_EVERY_S)
                continue
            pods = self._pods.by_name()
            failures = {
                member.rank: failure
                for member in self._gang.members
                if (failure := self._failure(pods.get(self._gang.pod_name(member)), is_late=is_late))
            }
            if failures:
                raise self._failed(failures)
            if all(pod["status"]["phase"] == "Succeeded" for pod in pods.values()):
                return
            self._pods.changed.wait(_LOOK_EVERY_S)

    def end(self, *, grace_s: float) -> None:
        """Delete all pods and what belongs to them; wait for the pods to be gone as long as they may take."""
        try:
            self._delete(f"{LEASE_LABEL}={self._gang.lease}", grace_s=int(grace_s))
        except (
            Exception
        ) as error:  # the lease ends all the same: until they are gone their GPUs are not offered
            log.warning(
                "Pods of lease %s could not be deleted (%s): kubectl delete service,pod -n %s -l %s=%s",
                *(self._gang.lease, error, self._namespace, LEASE_LABEL, self._gang.lease),
            )
            return
        deadline = time.monotonic() + grace_s + _LOOK_EVERY_S
        while self._pods.by_name() and time.monotonic() < deadline:
            self._pods.changed.wait(0.1)
            self._pods.changed.clear()

    def log_tail(self, member: Member) -> str:
        """Return the last lines that a pod printed, as far as they can be had."""
        try:
            return "\n".join(self.log(member).lines(tail=_TAIL_LINES))
        except log_errors() as error:
            return f"(no log: {getattr(error, 'reason', None) or error})"

    def log(self, member: Member) -> PodLog:
        """Return what a pod prints."""
        return PodLog(self._core, self._namespace, self._gang.pod_name(member))

    # -- starting
    def _start(self) -> None:
        found = self._listed()
        if any(failure_of(pod, is_late=False) for pod in found):
            log.info("Pods of an earlier try have failed: starting all anew")
            self._delete(f"{LEASE_LABEL}={self._gang.lease}")
            self._wait_gone()
        elif found:
            log.info("Going on with %d pod(s) of an earlier try", len(found))
        service = self._created(
            lambda: self._core.create_namespaced_service(self._namespace, service_body(self._gang)),
            lambda: self._core.read_namespaced_service(self._gang.name, self._namespace),
        )
        owner = {"metadata": {"name": service.metadata.name, "uid": service.metadata.uid}}
        bodies = [
            pinned(self._override(pod_body(self._gang, member)), self._gang, member, owner)
            for member in self._gang.members
        ]
        with ThreadPoolExecutor(min(_AT_ONCE, len(bodies))) as threads:
            list(threads.map(self._create_pod, bodies))

    def _create_pod(self, body: dict[str, Any]) -> None:
        name = body["metadata"]["name"]
        self._created(
            lambda: self._core.create_namespaced_pod(self._namespace, body),
            lambda: self._core.read_namespaced_pod(name, self._namespace),
        )

    def _created(self, create: Callable[[], T], read: Callable[[], T]) -> T:
        """Create an object, or return the one that is there: the names say that it is ours."""
        from kubernetes.client import ApiException

        try:
            return _repeated(create)
        except ApiException as error:
            if error.status != 409:
                raise
            return _repeated(read)

    def _listed(self) -> list[dict[str, Any]]:
        label = f"{LEASE_LABEL}={self._gang.lease}"
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        pages = _repeated(lambda: list(self._watcher.api.pages(path, labels=label)))
        return [pod for page, _ in pages for pod in page]

    def _wait_gone(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while self._listed() and time.monotonic() < deadline:
            time.sleep(0.2)

    # -- ending
    def _delete(self, selector: str, *, grace_s: int = _LEAST_GRACE_S) -> None:
        _delete(self._core, self._namespace, selector, grace_s=grace_s)

    def _failure(self, pod: dict[str, Any] | None, *, is_late: bool) -> PodFailure | None:
        if pod is not None:
            return failure_of(pod, is_late=is_late)
        if not self._watcher.listed.is_set():
            return PodFailure(PodCause.NOT_STARTED, "the API server does not tell where the pods are")
        return PodFailure(PodCause.DELETED, "the pod is gone: someone deleted it or its node")

    def _failed(self, failures: dict[int, PodFailure]) -> WorkerGroupFailed:
        rank, first = min(failures.items())
        member = self._gang.members[rank]
        tail = self.log_tail(member)
        return WorkerGroupFailed(
            f"pod {rank} ({self._gang.pod_name(member)} on node {member.node}) failed: {first.cause.value}: "
            f"{first.evidence}; its last lines:\n{tail}",
            reason=first.cause.value,
            failures={
                each: f"{failure.cause.value}: {failure.evidence}" for each, failure in failures.items()
            },
        )


def end_task(client: ApiClient, namespace: str, task: str) -> None:
    """Delete all pods of a task and their services, under whatever lease they run."""
    from kubernetes.client import CoreV1Api

    _delete(CoreV1Api(client), namespace, f"{TASK_LABEL}={task}", patience_s=_SHORT_PATIENCE_S)


def _delete(
    core: CoreV1Api,
    namespace: str,
    selector: str,
    *,
    grace_s: int = _LEAST_GRACE_S,
    patience_s: float = _PATIENCE_S,
) -> None:
    options = {"grace_period_seconds": max(grace_s, _LEAST_GRACE_S), "label_selector": selector}
    pods, services = core.delete_collection_namespaced_pod, core.delete_collection_namespaced_service
    _repeated(lambda: pods(namespace, **options), patience_s=patience_s)
    _repeated(lambda: services(namespace, label_selector=selector), patience_s=patience_s)


@contextmanager
def _refusals_told() -> Iterator[None]:
    """Turn what the cluster refuses into an error that says what to change."""
    from kubernetes.client import ApiException

    try:
        yield
    except ApiException as error:
        try:
            words = json.loads(error.body or "")["message"]
        except (ValueError, KeyError, TypeError):
            words = error.reason
        is_wrong = error.status in (400, 422)
        advice = "correct pod_override, command or env" if is_wrong else "look at rights and quotas there"
        raise WorkerGroupFailed(
            f"The cluster does not take the pods (HTTP {error.status}): {words}; {advice}.",
            reason=(PodCause.CONFIGURATION if is_wrong else PodCause.NOT_STARTED).value,
        ) from error


def _repeated(call: Callable[[], T], *, patience_s: float = _PATIENCE_S) -> T:
    """Repeat a call that can be repeated while the API server is away or busy."""
    repeating = Retrying(
        retry=retry_if_exception(_is_passing),
        wait=wait_random_exponential(multiplier=0.2, max=5.0),
        stop=stop_after_delay(patience_s),
        reraise=True,
    )
    return repeating(call)


def _is_passing(error: BaseException) -> bool:
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    if isinstance(error, ApiException):
        return error.status in (0, 429) or error.status >= 500
    return isinstance(error, HTTPError)
