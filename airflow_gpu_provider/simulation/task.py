"""A task as the simulator knows it: what it asks, when, and how long it would really run where.

The scheduler under test sees only the claim; the true run time is the simulator's secret, and what the task
promised (``max_runtime``) may be more, less or nothing. Seconds count from the start of the simulation; a
task that waits already has arrived before 0. The next step is `simulator.simulate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

from airflow_gpu_provider.broker.flavors import canonical_model
from airflow_gpu_provider.broker.model import Claim, ClaimId, DeviceId, GpuRequest, RunType
from airflow_gpu_provider.exceptions import InvalidRequest

#: Second 0 of every simulation. A fixed one: the same trace gives the same run on any day.
START = datetime(2030, 1, 1, tzinfo=timezone.utc)


def moment(seconds: float) -> datetime:
    """Return the virtual time as the core takes it."""
    return START + timedelta(seconds=seconds)


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a trace or of the present queue."""

    id: str
    arrives_s: float
    request: GpuRequest
    runtime_s: float | None = None  #: on models that `runtime_by_model` does not name; None = on none
    runtime_by_model: Mapping[str, float] = field(default_factory=dict)  #: by short model name
    value: float = 0.0
    run_type: RunType = RunType.LIVE
    team: str | None = None
    dag_id: str | None = None
    preemptible: bool = False
    completes: float | None = None  #: part of its DAG run that is done once it is; None = unknown
    queue_timeout_s: float | None = None  #: it fails when it waited so long; None = it waits for ever

    def runtime_on(self, models: Iterable[str]) -> float:
        """Return how long it runs on devices of these models: a gang is as slow as its slowest member."""
        return max(self._on(canonical_model(model)) for model in models)

    def knows(self, model: str) -> bool:
        """Return whether it is known how long it runs on a model."""
        return self.runtime_s is not None or canonical_model(model) in self.runtime_by_model

    def claim(self) -> Claim:
        """Return what the scheduler gets to see."""
        return Claim(
            id=ClaimId(self.id),
            request=self.request,
            submitted_at=moment(self.arrives_s),
            value=self.value,
            run_type=self.run_type,
            team=self.team,
            dag_id=self.dag_id,
            preemptible=self.preemptible,
            completes=self.completes,
        )

    def _on(self, model: str) -> float:
        found = self.runtime_by_model.get(model, self.runtime_s)
        if found is None:
            raise InvalidRequest(
                f"Task {self.id!r} may run on {model}, but how long it runs there is not given; known are "
                f"{', '.join(sorted(self.runtime_by_model)) or 'none'}: add runtime_s for all other models "
                f"or runtime_s.{model}",
                reason="unknown_runtime",
            )
        return found


@dataclass(frozen=True, slots=True)
class Running:
    """A task that holds devices when the simulation starts; it ends after ``left_s``."""

    task: Task
    devices: tuple[DeviceId, ...]
    started_s: float  #: 0 or before
    left_s: float
