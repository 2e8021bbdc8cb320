"""What all products of a chunk share while one stage runs, and what came of them.

Plain values between the operator, which knows the lease, and `runner`, which does the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from airflow_gpu_provider.catalog.ledger import MAX_ATTEMPTS, Outcome, Status
from airflow_gpu_provider.catalog.plan import Plan
from airflow_gpu_provider.exceptions import InvalidRequest


@dataclass(frozen=True)
class StageRun:
    """What is the same for all products of a chunk."""

    plan: Plan
    stage: str
    entrypoint: str
    params: Mapping[str, object] = field(default_factory=dict)
    torch_device: str = "cpu"
    device: str = "cpu"  #: the leased device's id
    device_model: str = "CPU"
    max_attempts: int = MAX_ATTEMPTS

    def __post_init__(self) -> None:
        if self.stage not in self.plan.stages:
            raise InvalidRequest(
                f"stage {self.stage!r} is not in the plan; its stages are {', '.join(self.plan.stages)}"
            )

    @property
    def before(self) -> str | None:
        """Name of the stage that must be done first."""
        position = self.plan.stages.index(self.stage)
        return self.plan.stages[position - 1] if position else None

    @property
    def is_last(self) -> bool:
        """Whether this stage's output is published."""
        return self.stage == self.plan.stages[-1]


@dataclass
class ChunkReport:
    """How many products ended how; ``failures`` are (sku, first line of the reason)."""

    done: int = 0
    reused: int = 0
    unusable: int = 0
    skipped: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    hopeless: int = 0  #: of the failed, those that a retry leaves alone

    @property
    def tried(self) -> int:
        """Number of products that were this stage's business."""
        return self.done + self.reused + self.unusable + len(self.failures)

    def as_json(self) -> dict[str, int]:
        """Return the counts."""
        return {
            "done": self.done,
            "reused": self.reused,
            "unusable": self.unusable,
            "skipped": self.skipped,
            "failed": len(self.failures),
        }

    def count(self, outcome: Outcome, run: StageRun, *, reused: bool) -> None:
        """Add one product's outcome; ``reused`` when nothing had to be done for it."""
        if outcome.status is Status.DONE:
            self.reused += reused
            self.done += not reused
        elif outcome.status is Status.UNUSABLE:
            self.unusable += 1
        else:
            self.failures.append((outcome.sku, (outcome.reason or "").partition("\n")[0]))
            self.hopeless += outcome.attempt >= run.max_attempts
