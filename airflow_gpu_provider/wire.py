"""What travels between the broker and those who talk to it.

Pydantic models only, without FastAPI or SQLAlchemy: tasks, triggers and agents import this file. Unknown
fields are refused on requests, so that a misspelt field is an error and not a silent default.
"""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from airflow_gpu_provider.broker.artifact_names import artifact_names
from airflow_gpu_provider.broker.label_names import checked_labels, checked_taints
from airflow_gpu_provider.broker.model import GpuRequest, RunType

API_PREFIX = "/gpu"


#: Larger than any fleet, and small enough for every sum and every column.
MOST_GPUS = 100_000
MOST_MIB = 2**40
MOST_SECONDS = 10 * 366 * 86_400.0
MOST = 1e12
_INT32 = 2**31 - 1

#: outcome of work that ended well
DONE = "done"
#: outcome of work that stopped for other work, and how its lease ended: its claim waits again
PREEMPTED = "preempted"
#: why a renewal is refused: the task ended while its work went on without its worker
TASK_OVER = "task_over"
#: why a renewal is refused: a later try of the task holds the lease
PASSED_ON = "passed_on"


def no_nul(text: str) -> str:
    """Refuse text that PostgreSQL cannot store."""
    if "\0" in text:
        raise ValueError("must not contain NUL")
    return text


MOST_NAME = 250
Name = Annotated[str, Field(max_length=MOST_NAME), AfterValidator(no_nul)]
#: A path or a digest.
Artifact = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(no_nul)]
#: Labels of nodes, NAME=VALUE.
Labels = Annotated[tuple[str, ...], AfterValidator(checked_labels)]
Taints = Annotated[tuple[str, ...], AfterValidator(checked_taints)]


class Body(BaseModel):
    """Base of all that is sent to the broker: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def wrong_fields(error: ValidationError) -> str:
    """Return every wrong field of a body in one sentence."""
    wrong = (
        f"{'.'.join(str(part) for part in each['loc']) or 'body'}: {each['msg']}"
        for each in error.errors(include_url=False, include_context=False)
    )
    return f"{error.title} is refused: {'; '.join(wrong)}."


class ClaimState(str, Enum):
    """State of a claim; a terminal one never changes again."""

    PENDING = "pending"
    GRANTED = "granted"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    ENDED = "ended"

    @property
    def is_terminal(self) -> bool:
        """True when the claim can no longer get or hold devices."""
        return self in (ClaimState.REJECTED, ClaimState.CANCELLED, ClaimState.ENDED)


class TaskKey(Body):
    """The task try that asks; together it is the idempotency key of a claim."""

    dag_id: Name
    run_id: Name
    task_id: Name
    map_index: int = Field(-1, ge=-1, le=_INT32)
    try_number: int = Field(1, ge=1, le=_INT32)


class RequestBody(Body):
    """`GpuRequest` on the wire. Memory in MiB."""

    gpus: int = Field(1, ge=1, le=MOST_GPUS)
    models: tuple[Name, ...] = Field((), max_length=1000)
    memory_mib: int = Field(0, ge=0, le=MOST_MIB)
    min_tflops: float = Field(0.0, ge=0, le=MOST)
    strict: bool = False
    cpu_cores: float = Field(0.0, ge=0, le=MOST_GPUS * 1000)
    host_memory_mib: int = Field(0, ge=0, le=MOST_MIB)
    host: Name | None = None
    spares: int = Field(0, ge=0, le=MOST_GPUS)
    max_runtime_s: float | None = Field(None, gt=0, le=MOST_SECONDS)
    milli: int = Field(1000, ge=1, le=1000)
    task_class: Name | None = None
    artifacts: tuple[Artifact, ...] = Field((), max_length=100)
    artifacts_required: bool = False
    node_labels: Labels = ()
    tolerates: Taints = ()

    def to_request(self) -> GpuRequest:
        """Return the core's value."""
        sets = {name: frozenset(getattr(self, name)) for name in ("models", "node_labels", "tolerates")}
        return GpuRequest(**{**dict(self), **sets, "artifacts": artifact_names(self.artifacts)})

    @classmethod
    def from_request(cls, request: GpuRequest) -> RequestBody:
        """Return the wire form of the core's value."""
        return cls(
            gpus=request.gpus,
            models=tuple(sorted(request.models)),
            memory_mib=request.memory_mib,
            min_tflops=request.min_tflops,
            strict=request.strict,
            cpu_cores=request.cpu_cores,
            host_memory_mib=request.host_memory_mib,
            host=request.host,
            spares=request.spares,
            max_runtime_s=request.max_runtime_s,
            milli=request.milli,
            task_class=request.task_class,
            artifacts=tuple(sorted(request.artifacts)),
            artifacts_required=request.artifacts_required,
            node_labels=tuple(sorted(request.node_labels)),
            tolerates=tuple(sorted(request.tolerates)),
        )


class ClaimBody(Body):
    """Ask for devices. The same key returns the same claim."""

    key: TaskKey
    request: RequestBody
    value: float = Field(0.0, ge=-MOST, le=MOST)
    run_type: RunType = RunType.LIVE
    team: Name | None = None
    preemptible: bool = False
    outlives_worker: bool = False  #: its work goes on while no worker runs the task, until the task is over
    completes: float | None = Field(None, ge=0, le=1)  # part of its DAG run that is done once it is
    ti_id: Annotated[str, Field(max_length=36), AfterValidator(no_nul)] | None = None
    owner: Annotated[str, Field(max_length=500), AfterValidator(no_nul)] | None = None

    def of_at_least(self, milli: int) -> ClaimBody:
        """Return the claim with a share that is not smaller than this."""
        if self.request.milli >= milli:
            return self
        return self.model_copy(update={"request": self.request.model_copy(update={"milli": milli})})


class DeviceView(BaseModel):
    """A leased device as its holder sees it."""

    id: str
    node: str
    host: str
    model: str
    memory_mib: int
    tflops: float
    simulated: bool
    milli: int = 1000  #: what is leased of it; 1000 = the whole device

    @property
    def memory_limit_mib(self) -> int | None:
        """The memory that its holder may use; None = all of it, the device is not shared."""
        return None if self.milli == 1000 else self.memory_mib * self.milli // 1000


class LeaseView(BaseModel):
    """A lease as its holder sees it; ``secret`` must be presented to renew or release."""

    lease_id: str
    claim_id: str
    epoch: int
    secret: str
    devices: list[DeviceView]
    spares: list[DeviceView] = []
    match_degree: float
    granted_at: datetime
    expires_at: datetime
    ttl_s: float
    latency_ms: dict[str, dict[str, float]] = {}  #: between its nodes, from each to each, where measured


class ClaimView(BaseModel):
    """Where a claim stands."""

    claim_id: str
    key: TaskKey
    state: ClaimState
    reason_code: str | None = None
    reason: str | None = None
    position: int | None = None
    starts_in_s: float | None = None
    lease: LeaseView | None = None


class WaitBody(Body):
    """Long-poll: answer when one of the claims is no longer pending, or is near its turn.

    The first request names all claims and gets the name of a watch; further ones name the watch, the claims
    to add and those that were heard of.
    """

    claim_ids: tuple[Name, ...] = Field((), max_length=100_000)
    timeout_s: float = Field(20.0, ge=0, le=60)
    near_s: float | None = Field(None, ge=0)
    watch: Name | None = None
    drop: tuple[Name, ...] = ()


class WaitAnswer(BaseModel):
    """The claims that need no more waiting, and those that the broker does not know.

    `watch` is None when the replica that answered has no such watch: name all claims again.
    """

    watch: str | None = None
    ready: list[ClaimView] = []
    unknown: list[str] = []


class LeaseBody(Body):
    """What the holder of a lease presents with everything that it asks about it."""

    secret: str = Field(max_length=200)
    epoch: int = Field(ge=1, le=_INT32)


class RenewBody(LeaseBody):
    """Keep a lease. ``saved_s`` ago its work was last saved: what loses little is taken back first."""

    saved_s: float | None = Field(default=None, ge=0, le=MOST_SECONDS)


class RenewAnswer(BaseModel):
    """Until when a renewed lease lives.

    One that is being taken back for other work ends in ``ends_in_s`` at the latest, and ``reason`` says why:
    its holder saves its work, releases it with the outcome "preempted" and waits for its claim again.
    """

    expires_at: datetime
    ends_in_s: float | None = None
    reason: str | None = None


class ReleaseBody(LeaseBody):
    """Give a lease back. ``failed_devices`` are excluded for the retry of the same task.

    The rest tells what the run was like, for those that follow: ``work`` in units that its task class keeps
    to, done in ``work_s`` seconds; of a training its ``shards``, how many of them failed for a fault that was
    not the user's, and on which nodes.
    """

    outcome: Name = DONE
    failed_devices: tuple[Name, ...] = Field((), max_length=MOST_GPUS)
    work: float | None = Field(default=None, gt=0, le=MOST)
    work_s: float | None = Field(default=None, gt=0, le=MOST_SECONDS)
    shards: int | None = Field(default=None, ge=1, le=MOST_GPUS)
    failures: int = Field(default=0, ge=0, le=MOST_GPUS)
    failed_on: tuple[Name, ...] = Field(default=(), max_length=MOST_GPUS)

    @model_validator(mode="after")
    def _adds_up(self) -> ReleaseBody:
        if (self.work is None) != (self.work_s is None):
            raise ValueError("work and work_s, the seconds it took, are given together or not at all")
        if self.failures > (self.shards or 0):
            raise ValueError(f"{self.failures} failures of {self.shards or 0} shards: count each shard once")
        return self

    @property
    def tells_history(self) -> bool:
        """Whether anything can be learned from it."""
        return self.work is not None or self.shards is not None
