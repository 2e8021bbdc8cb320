"""Failures that no retry can mend end a task at once, whatever retries it has left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from airflow.sdk.exceptions import AirflowFailException

from airflow_gpu_provider.exceptions import IdentityRefused, InvalidRequest, RequestRejected

_HOPELESS = (InvalidRequest, RequestRejected, IdentityRefused)


@contextmanager
def fail_the_hopeless() -> Iterator[None]:
    """Turn such an error into one that Airflow does not retry; its sentence and reason stay."""
    try:
        yield
    except _HOPELESS as error:
        raise AirflowFailException(f"{error.message} [{error.reason}]") from error
