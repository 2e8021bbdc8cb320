"""What a training run is: written once by the operator, read by the supervisor and every shard.

Pydantic, because the file crosses a process border; unknown fields are refused. Without torch, so that a
launcher can build a plan inside a DAG's process. `RunPaths` is the only place that knows file names. Next:
`supervisor`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.network_options import NetworkOptions
from airflow_gpu_provider.training.script import Script

_ENTRYPOINT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check_entrypoint(entrypoint: str) -> str:
    """Return ``entrypoint`` when it reads ``package.module:function``, else raise InvalidRequest."""
    if not _ENTRYPOINT.fullmatch(entrypoint):
        raise InvalidRequest(
            f"entrypoint={entrypoint!r} does not name a function; write it as 'package.module:function', for "
            "example 'workloads.language_model.training:train'."
        )
    return entrypoint


def check_grow_at(grow_at: object) -> float | None:
    """Return a valid ``grow_at``, else raise InvalidRequest."""
    if grow_at is None:
        return None
    if isinstance(grow_at, bool) or not isinstance(grow_at, int | float) or not 0 < grow_at <= 1:
        raise InvalidRequest(
            f"grow_at={grow_at!r}: allowed is a part of a shard's memory above 0 and up to 1, for example "
            "0.9, or None for shards that never ask for more."
        )
    return float(grow_at)


class Slot(BaseModel):
    """Where one shard process runs: its environment and the device torch sees in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device_ids: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    torch_device: str = "cpu"
    memory_mib: int | None = None  #: what the shard may use of each of its devices; None = not known


class RunPlan(BaseModel):
    """One attempt of one training run. Lengths of time are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str = Field(min_length=1)
    run_dir: Path  #: of this attempt: plan, run.json, logs, telemetry
    checkpoint_dir: Path  #: shared by all attempts of the run
    entrypoint: str | None = None  #: the author's function, or
    script: Script | None = None  #: his script
    params: dict[str, JsonValue] = {}
    shard_count: int = Field(ge=1)
    sync_interval: int = Field(ge=1)
    network: NetworkOptions = NetworkOptions()
    relay_node: str | None = None  #: where store and rank 0 are best: the least latency to all other nodes
    spans_hosts: bool = False  #: its devices are on several hosts
    seed: int = 0
    backend: Literal["gloo", "nccl"] = "gloo"
    member_slots: tuple[Slot, ...]  #: by logical rank
    spare_slots: tuple[Slot, ...] = ()
    python_path: tuple[str, ...] = ()  #: appended to the shard's own, so that the entrypoint can be imported
    threads_per_shard: int = Field(default=1, ge=1)
    checkpoint_every_s: float = Field(default=30.0, ge=0)
    allow_non_finite_loss: bool = False  #: else a loss that is NaN or infinite ends the run
    keep_checkpoints: int = Field(default=2, ge=1)
    max_respawns: int = Field(default=2, ge=0)  #: without any progress in between
    heartbeat_s: float = Field(default=0.2, gt=0)
    stopped_timeout_s: float = Field(default=1.0, gt=0)  #: for a shard that a signal has stopped
    heartbeat_timeout_s: float = Field(default=10.0, gt=0)  #: for one that is silent and does not compute
    busy_timeout_s: float = Field(default=60.0, gt=0)  #: for one that is silent but computes: the GIL
    fence_timeout_s: float = Field(default=30.0, gt=0)  #: for a process that was killed to be gone
    startup_timeout_s: float = Field(default=300.0, gt=0)  #: from a shard's start to its first heartbeat
    join_timeout_s: float = Field(default=1800.0, gt=0)  #: from a shard's start to its loop
    stall_timeout_s: float = Field(
        default=900.0, gt=0
    )  #: a shard that computes this long without ending a step hangs
    sync_timeout_s: float = Field(default=1800.0, gt=0)
    least_devices: int | None = Field(default=None, ge=1)  #: of an elastic run; at most one for each shard
    stream_priority: int = Field(default=0, ge=-1, le=0)  #: of the author's CUDA work; -1 goes first
    grow_at: float | None = Field(
        default=None, gt=0, le=1
    )  #: part of its memory at which a shard asks for more; None: nobody who holds a lease is there to ask
    stop_grace_s: float = Field(
        default=10.0, ge=0
    )  #: shorter than a lease's TTL: it also runs when the operator died

    @field_validator("entrypoint")
    @classmethod
    def _entrypoint_names_a_function(cls, value: str | None) -> str | None:
        return None if value is None else check_entrypoint(value)

    @model_validator(mode="after")
    def _one_slot_per_rank(self) -> RunPlan:
        if len(self.member_slots) != self.shard_count:
            raise ValueError(f"{len(self.member_slots)} member slots for {self.shard_count} shards")
        return self

    @model_validator(mode="after")
    def _one_thing_to_run(self) -> RunPlan:
        if (self.entrypoint is None) == (self.script is None):
            raise ValueError("give either an entrypoint or a script")
        return self

    @property
    def paths(self) -> RunPaths:
        """Return the names of this attempt's files."""
        return RunPaths(self.run_dir)


class RunPaths:
    """All file names of one attempt."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.plan = run_dir / "plan.json"
        self.lease_lost = run_dir / "lease_lost"
        self.run = run_dir / "run.json"
        self.keeper = run_dir / "keeper.json"
        self.keeper_orders = run_dir / "keeper_orders.json"
        self.keeper_log = run_dir / "keeper.log"
        self.supervisor_log = run_dir / "supervisor.log"
        self.logs = run_dir / "logs"
        self.failures = run_dir / "failures"
        self.telemetry = run_dir / "telemetry"

    def create(self) -> None:
        """Make the folders."""
        for folder in (self.run_dir, self.logs, self.failures, self.telemetry):
            folder.mkdir(parents=True, exist_ok=True)

    def log(self, uid: str) -> Path:
        """Return where the process ``uid`` prints to."""
        return self.logs / f"{uid}.log"

    def failure(self, uid: str) -> Path:
        """Return where the process ``uid`` says why it failed."""
        return self.failures / f"{uid}.json"

    @property
    def mirror(self) -> Path:
        """Return where it is said how the copying to object storage goes."""
        return self.run_dir / "mirror.json"

    @property
    def run_telemetry(self) -> Path:
        """Return where the supervisor writes how the run goes."""
        return self.telemetry / "run.jsonl"

    def shard_telemetry(self, uid: str) -> Path:
        """Return where the process ``uid`` writes its measurements."""
        return self.telemetry / f"{uid}.jsonl"
