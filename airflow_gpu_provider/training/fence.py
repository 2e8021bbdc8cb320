"""Takes lost processes out of a run: ended before anyone has their place, or given up with their place.

Invariant: nobody takes a rank while its old holder can still act. One that SIGKILL does not end (`endings`)
cannot act, so the run goes on without it; nothing is started on its devices any more, and they are told as
suspect, with what the kernel says of the process. Used by `supervisor`, `growth` and `handover`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from airflow_gpu_provider.training.children import Children
from airflow_gpu_provider.training.failures import FailureCause, ShardFailure
from airflow_gpu_provider.training.liveness import Liveness
from airflow_gpu_provider.training.run_file import RunRecord

log = logging.getLogger(__name__)


class Fence:
    """One run's."""

    def __init__(self, children: Children, liveness: Liveness, record: RunRecord) -> None:
        self._children = children
        self._liveness = liveness
        self._record = record

    def shut_out(self, uids: Iterable[str]) -> dict[str, str]:
        """End processes; return those that do not end, with the evidence."""
        out = tuple(uids)
        staying = self._children.fence(out)
        for uid in out:
            self._liveness.forget(uid)
        for uid, evidence in staying.items():
            self._suspect(uid)
            log.error("%s: %s; its place is given up", uid, evidence)
            self._record.note(f"{uid} {evidence}; nothing is started in its place any more")
        return staying

    def shut_out_lost(self, lost: Sequence[ShardFailure]) -> list[ShardFailure]:
        """End lost processes and return the failures with what came to light."""
        if not lost:
            return []
        for failure in lost:
            log.warning("Lost: %s", failure.sentence)
        staying = self.shut_out(failure.uid for failure in lost)
        for failure in lost:
            if failure.cause is FailureCause.GPU_FAULT and failure.uid not in staying:
                self._suspect(failure.uid)
        return [
            failure.model_copy(update={"evidence": f"{failure.evidence}; {staying[failure.uid]}"})
            if failure.uid in staying
            else failure
            for failure in lost
        ]

    def shut_out_all(self) -> None:
        """End every process of the run."""
        self.shut_out(self._children.unended())

    def _suspect(self, uid: str) -> None:
        devices = self._children.slot(uid).device_ids
        self._record.suspect_devices += [each for each in devices if each not in self._record.suspect_devices]
