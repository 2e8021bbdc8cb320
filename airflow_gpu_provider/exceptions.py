"""The errors of the provider; the class says what the caller should do next.

Every error has a ``reason`` (a stable code for programs) and a sentence for people that names what
was asked, what there is and what to change. This module imports nothing of the project, so that any
layer, and a process without Airflow, can raise and unpickle them.
"""

from __future__ import annotations

from collections.abc import Mapping


class GpuProviderError(Exception):
    """Base of all errors of this provider."""

    default_reason = "error"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.reason))


def _rebuild(cls: type[GpuProviderError], message: str, reason: str) -> GpuProviderError:
    return cls(message, reason=reason)


class InvalidRequest(GpuProviderError, ValueError):
    """An argument is wrong whatever the fleet looks like: correct the DAG or the configuration."""

    default_reason = "invalid_request"


class RequestRejected(GpuProviderError):
    """The whole fleet can never serve this request: lower it or add nodes; a retry cannot help."""

    default_reason = "exceeds_fleet"


class QueueTimeout(GpuProviderError):
    """The claim waited longer than its ``queue_timeout``: retry later or raise the timeout."""

    default_reason = "queue_timeout"


class LeaseLost(GpuProviderError):
    """The devices are no longer ours: stop using them at once; a retry may get others."""

    default_reason = "lease_lost"


class LeasePreempted(LeaseLost):
    """The devices are being taken back for other work: save, stop, and the task asks again by itself."""

    default_reason = "preempted"


class NotResized(GpuProviderError):
    """A lease cannot become what was asked: it stays as it is, go on with it or ask for less."""

    default_reason = "not_resized"


class BrokerUnavailable(GpuProviderError):
    """The broker did not answer: nothing is lost, retry later."""

    default_reason = "broker_unavailable"


class IdentityRefused(GpuProviderError):
    """The broker token is missing, expired or of the wrong role: mint another one."""

    default_reason = "identity_refused"


class ArtifactIncomplete(GpuProviderError):
    """A model or data set is missing or still being written: wait for it or correct the path."""

    default_reason = "artifact_incomplete"


class ManifestInvalid(GpuProviderError, ValueError):
    """The product catalogue cannot be read as one: correct the file."""

    default_reason = "manifest_invalid"


class BatchIncomplete(GpuProviderError):
    """Products that should work failed; the rest is done and a rerun does only what is missing."""

    default_reason = "batch_incomplete"


class FolderInUse(GpuProviderError):
    """Another training writes into the same ``checkpoint_dir``: give it one of its own, or retry later."""

    default_reason = "folder_in_use"


class WorkerGroupFailed(GpuProviderError):
    """A training run ended without its result; ``failures`` gives the cause for each rank."""

    default_reason = "worker_group_failed"

    def __init__(
        self, message: str, *, reason: str | None = None, failures: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(message, reason=reason)
        self.failures = dict(failures or {})

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_group, (self.message, self.reason, self.failures))


def _rebuild_group(message: str, reason: str, failures: dict[int, str]) -> WorkerGroupFailed:
    return WorkerGroupFailed(message, reason=reason, failures=failures)
