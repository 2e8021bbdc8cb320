"""What a task says beside its devices: how long it waits, its value, names and what it reads.

Checked by `asking` when the DAG file is parsed, or once templates are rendered, so that nothing waits for
devices and fails then. The devices themselves are checked by `broker.request`. The empty text of a template
leaves a wish out; an author who writes it has meant something else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import timedelta

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.wire import MOST_NAME

#: "sha256:ab12...": digests are compared as they are
_DIGEST = re.compile(r"[A-Za-z0-9_+.-]+:[^\s/]+|[0-9a-fA-F]{32,}")


def check_queue_timeout(timeout: object) -> None:
    """Raise InvalidRequest unless it is a length of time or None."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is None:
        return
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds < math.inf:  # type: ignore[operator]
        raise InvalidRequest(
            f"queue_timeout={timeout!r}: allowed are seconds of 0 or more or a timedelta, for example "
            "queue_timeout=600; leave it out to wait without a limit."
        )
    try:
        timedelta(seconds=seconds)  # type: ignore[arg-type]
    except OverflowError:
        raise InvalidRequest(
            f"queue_timeout={timeout!r} is longer than time is counted; leave it out to wait without a limit."
        ) from None


def check_value(value: object) -> float | None:
    """Return a task's value as a number, None when it is not given. Raise InvalidRequest."""
    if value is None:
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(
            f"value={value!r} is not a number; give the task's business value, higher is sooner, e.g. "
            "value=120, or leave it out for the task's priority weight."
        )
    return number


def check_name(argument: str, name: object, *, longest: int | None = MOST_NAME) -> None:
    """Raise InvalidRequest unless it is a text that the broker can store, or None."""
    if name is None:
        return
    if not isinstance(name, str) or "\0" in name:
        raise InvalidRequest(f"{argument}={name!r} is no name; write a text such as {argument}='vision'.")
    if longest is not None and len(name) > longest:
        raise InvalidRequest(
            f"{argument}='{name[:20]}...' has {len(name)} characters; allowed are {longest}: shorten it."
        )


def check_given_model(model: object) -> None:
    """Raise InvalidRequest for a model that is written as nothing: it would get any device."""
    names = model.split("|") if isinstance(model, str) else model
    if isinstance(names, list | tuple | set | frozenset) and not any(str(name).strip() for name in names):
        raise InvalidRequest(
            f"model={model!r} names no GPU model: write 'A100', 'A100|H100' or a list of names, or leave it "
            "out for any model."
        )


def check_artifacts(artifacts: object) -> None:
    """Raise InvalidRequest for a name that no node can report: neither absolute path nor digest."""
    names = [artifacts] if isinstance(artifacts, str) else artifacts
    if not isinstance(names, Iterable):
        return  # `broker.request` tells what is wrong
    for name in names:
        if not isinstance(name, str) or not (text := name.strip()):
            continue
        if not text.startswith("/") and not _DIGEST.fullmatch(text):
            raise InvalidRequest(
                f"artifacts: {name!r} is neither an absolute path nor a digest, so no node reports it; write "
                f"it as nodes do, such as '/data/{text}' or 'sha256:...'."
            )
