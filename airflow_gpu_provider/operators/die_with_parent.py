"""Let this process die with its parent.

An orphan of a killed Airflow worker must not go on using devices that are no longer its own. Linux only:
elsewhere the lease ends by its TTL, and the work with it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from airflow_gpu_provider.exceptions import LeaseLost
from airflow_gpu_provider.training.parenthood import signal_with_parent

log = logging.getLogger(__name__)


def die_with_parent(signal_number: int) -> None:
    """Ask the kernel for `signal_number` when the parent dies; 0 takes it back. Linux only."""
    if sys.platform != "linux":
        return
    try:
        signal_with_parent(signal_number)
    except OSError as error:
        log.warning("This process would outlive its parent: %s", error)
    if signal_number and os.getppid() == 1 and os.getpid() != 1:
        raise LeaseLost("The parent of this task died before it began to work.")


@contextmanager
def dying_with_parent() -> Iterator[None]:
    """Let this process die with its parent meanwhile.

    An orphan of a killed worker would follow a training on, end it at its own time limit, or start another.
    """
    die_with_parent(signal.SIGKILL)
    try:
        yield
    finally:
        die_with_parent(0)
