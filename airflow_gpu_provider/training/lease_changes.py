"""What the supervisor sees of the changes of its lease, whichever kind of them the run's plan allows.

A run grows in memory (`growth`), or in devices where its author gave a range (`refit`). Either way ranks may
go to other places in a `handover`, and the supervisor asks the same of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from airflow_gpu_provider.training.children import Children
from airflow_gpu_provider.training.coordination import RunStore
from airflow_gpu_provider.training.failures import ShardFailure
from airflow_gpu_provider.training.fence import Fence
from airflow_gpu_provider.training.growth import Growth
from airflow_gpu_provider.training.liveness import Liveness
from airflow_gpu_provider.training.membership import Membership
from airflow_gpu_provider.training.plan import RunPlan, Slot
from airflow_gpu_provider.training.refit import Refit
from airflow_gpu_provider.training.run_file import RunRecord


class LeaseChanges(Protocol):
    """Changes of one run's lease."""

    refusal: str | None

    @property
    def promised(self) -> Mapping[int, str]:
        """The ranks that are kept for a process of their own, which may not be there yet."""

    @property
    def wants_pause(self) -> bool:
        """True while the shards should stop at a synchronisation."""

    def limits(self, membership: Membership) -> dict[str, int]:
        """Return the memory of each process whose limit is another than at its start."""

    def unanswered(self, failures: list[ShardFailure]) -> list[ShardFailure]:
        """Return the failures that no change of the lease has answered."""

    def note_loss(self, failure: ShardFailure) -> None:
        """Hear of a shard that is lost."""

    def give_up(self) -> None:
        """Begin nothing more: the run ends."""

    def tick(self, membership: Membership, now: float) -> Membership:
        """Do what is due and return the membership after it."""


def changes_of(
    plan: RunPlan,
    record: RunRecord,
    store: RunStore,
    children: Children,
    liveness: Liveness,
    fence: Fence,
    start: Callable[[Slot], str],
) -> LeaseChanges:
    """Return what the plan allows."""
    kind = Growth if plan.least_devices is None else Refit
    return kind(plan, record, store, children, liveness, fence, start)
