"""What the holder of a run's lease tells the broker of the run, when it has ended.

Read from the run's record as it grows: which devices failed, how fast the steps went, which shards were lost.
Used by `keeper`.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.run_file import RunRecord, RunState

if TYPE_CHECKING:
    from airflow_gpu_provider.operators.held_lease import HeldLease

_LEAST_MEASURED_S = 5.0  # records are up to half a second late
_STEPPING = (RunState.RUNNING, RunState.FINISHING)


class StepsSeen:
    """The first and the newest step, each with when the supervisor first wrote it."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, datetime]] = []

    def note(self, record: RunRecord) -> None:
        """Take one look at the record."""
        if record.step > (self._seen[-1][0] if self._seen else 0) and record.state in _STEPPING:
            self._seen[1:] = [(record.step, record.updated_at)]

    def measured(self) -> tuple[int, float] | None:
        """Return (steps, seconds) between the first and the last step seen; None = too short to tell.

        So the time that processes take to start is left out, and what takeovers cost is not.
        """
        if len(self._seen) < 2:
            return None
        (first, began_at), (last, ended_at) = self._seen
        seconds = (ended_at - began_at).total_seconds()
        return (last - first, seconds) if seconds >= _LEAST_MEASURED_S else None


def report_run(record: RunRecord, steps: StepsSeen, plan: RunPlan, lease: HeldLease) -> None:
    """Tell the lease what its release is to say."""
    for device_id in record.suspect_devices:
        lease.report_failed_device(device_id)
    # How fast shards are that share a device by turns says little of the device.
    if plan.least_devices is None and (measured := steps.measured()) is not None:
        count, seconds = measured
        lease.report_work(count * plan.shard_count, seconds=seconds)
    lease.report_shards(plan.shard_count, failed_on=failed_on(record, plan, lease))


def failed_on(record: RunRecord, plan: RunPlan, lease: HeldLease) -> list[str | None]:
    """Return the node of each shard that failed for a fault that was not its author's, None = not known.

    A rank that was lost twice counts once: what is wanted is how many of the shards needed a spare.
    """
    node_of = {device.id: device.node for device in (*lease.devices, *lease.spares)}
    slots = (*plan.member_slots, *plan.spare_slots)
    found: dict[int, str | None] = {}
    for failure in record.failures:
        if failure.rank is None or failure.cause.ends_run or failure.rank in found:
            continue
        number = int(failure.uid.removeprefix("u"))  # processes are numbered in the order of their slots
        devices = slots[number].device_ids if number < len(slots) else ()
        found[failure.rank] = next((node_of[each] for each in devices if each in node_of), None)
    return list(found.values())
