"""What a pod prints, line by line, while it runs.

A connection that ends before the pod does is opened again, and lines that were told before are not told
twice. Used by `pod_gang` and the operator; a log that cannot be had is never a reason to fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api

_AGAIN_S = 1.0
#: A log that ended so often without a new line has ended, not its connection.
_ENDS = 2


def log_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a log that cannot be had."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    return ApiException, HTTPError


class PodLog:
    """The log of a pod's first container."""

    def __init__(self, core: CoreV1Api, namespace: str, pod: str) -> None:
        self._core = core
        self._namespace = namespace
        self._pod = pod

    def lines(self, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        """Yield the lines there are, or with ``follow`` all until the pod ends."""
        asked: dict[str, Any] = {"follow": follow, "tail_lines": tail}
        # the raw answer: the client's own decoding differs from version to version
        answer = self._core.read_namespaced_pod_log(
            self._pod,
            self._namespace,
            _preload_content=False,
            **{name: value for name, value in asked.items() if value},
        )
        rest = b""
        try:
            for piece in answer.stream(amt=None, decode_content=True):
                *whole, rest = (rest + piece).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
            if rest:
                yield rest.decode(errors="replace")
        finally:
            answer.close()

    def tell(self, say: Callable[[str], None], is_over: threading.Event) -> None:
        """Say each line once, until the pod has ended or ``is_over``. For a thread of its own."""
        told, ends = 0, 0
        while ends < _ENDS and not is_over.is_set():
            before = told
            try:
                for number, line in enumerate(self.lines(follow=True)):
                    if number >= told:
                        say(line)
                        told = number + 1
                ends = ends + 1 if told == before else 0
            except log_errors():
                ends = 0  # it has not started, or the connection was lost
            is_over.wait(_AGAIN_S)
