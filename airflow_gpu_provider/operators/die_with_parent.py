"""Let this process die with its parent.

An orphan of a killed Airflow worker must not go on using devices that are no longer its own. Linux only:
elsewhere the lease ends by its TTL, and the work with it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys

from airflow_gpu_provider.exceptions import LeaseLost

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: int) -> None:
    """Ask the kernel for `signal_number` when the parent dies; 0 takes it back. Linux only."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        log.warning("prctl(PR_SET_PDEATHSIG) failed: %s", os.strerror(ctypes.get_errno()))
    if signal_number and os.getppid() == 1 and os.getpid() != 1:
        raise LeaseLost("The parent of this task died before it began to work.")
