"""Let a process show which lease it works for, so that the agent does not take it for an outsider.

A process that was *started* under a lease has GPU_LEASE_ID in its environment, which the kernel shows. One
that got its lease while it already ran (a task of Airflow) cannot: the kernel shows the environment of its
start. It opens an empty memory file whose name is the mark: that vanishes with the process, and nobody
else can set it. The next step is `processes.ProcTable`, which reads both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

LEASE_VARIABLE = "GPU_LEASE_ID"


@contextmanager
def lease_mark(lease_id: str) -> Iterator[None]:
    """Show the lease while the block runs. Forked children show it too; on systems without it, do nothing."""
    if not hasattr(os, "memfd_create"):
        yield
        return
    mark = os.memfd_create(f"{LEASE_VARIABLE}={lease_id}")
    try:
        yield
    finally:
        os.close(mark)
