"""Processes that end with their parent, so that no orphan trains on devices that are no longer ours.

The kernel's parent-death signal fires when the *thread* that started the child ends; children must therefore
be started from a thread that lives as long as its process. Linux only; elsewhere the store's loss ends a
shard.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Ask the kernel to SIGKILL this process when its parent ends; end now when that has happened already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)
