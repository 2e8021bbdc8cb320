"""Keep a lease while a task prepares what will hold it.

What takes a while before a run starts (a checkpoint comes from object storage) must not cost the lease. The
thread only renews: what was lost is raised when the preparation has ended, before anything uses the devices.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from airflow_gpu_provider.exceptions import GpuProviderError, LeaseLost
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.operators.lease_time import renewal_pause_s
from airflow_gpu_provider.wire import LeaseView, RenewBody

log = logging.getLogger(__name__)


@contextmanager
def renewed_meanwhile(lease: LeaseView, hook: GpuBrokerHook) -> Iterator[None]:
    """Renew the lease like its holder will. Raise LeaseLost at the end when it was lost meanwhile."""
    renewals, body = hook.for_renewals(lease.ttl_s), RenewBody(secret=lease.secret, epoch=lease.epoch)
    is_over = threading.Event()
    lost: list[LeaseLost] = []

    def renew() -> None:
        while not is_over.wait(renewal_pause_s(lease.ttl_s)):
            try:
                renewals.renew(lease.lease_id, body)
            except LeaseLost as error:
                lost.append(error)
                return
            except GpuProviderError as error:
                log.warning("Lease %s not renewed while the run is prepared: %s", lease.lease_id, error)

    thread = threading.Thread(target=renew, name="gpu-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if lost:
        raise lost[0]
