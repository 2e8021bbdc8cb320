"""Rows for people: fleet, queue, leases, drains and history, the same for the page, the CLI and the API.

Built in `server.views`; unknown is None, which is shown as N/A and is not 0. No row carries a secret.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel

from airflow_gpu_provider.broker.model import RunType
from airflow_gpu_provider.wire import RequestBody, TaskKey


class HolderRow(BaseModel):
    """Who holds a device, or shares it."""

    task: str
    lease_id: str
    share: float  #: of the device, 1 = all of it


class DeviceRow(BaseModel):
    """A device for people."""

    id: str
    model: str
    memory_mib: int
    tflops: float
    state: str  #: free | shared (some of it is free) | leased | drained | unavailable | stale
    why: str | None = None
    utilisation: float | None = None
    memory_used_mib: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    simulated: bool = False
    holders: list[HolderRow] = []
    free: float  #: what a claim could have of it now, 1 = all of it


class NodeRow(BaseModel):
    """A node for people."""

    name: str
    host: str
    cpu_cores: float
    memory_mib: int
    load: float | None
    state: str  #: ready | drained | stale
    why: str | None = None
    report_age_s: float
    artifacts: list[str] = []
    latency_ms: dict[str, float] = {}  #: to other nodes, where measured
    loss: dict[str, float] = {}  #: the share of lost questions, of the nodes to which any was lost
    devices: list[DeviceRow]


class QueueRow(BaseModel):
    """A pending claim for people."""

    claim_id: str
    key: TaskKey
    request: RequestBody
    asked: str
    value: float
    completes: float | None = None  #: part of its DAG run that is done once it is
    score: float  #: its place by itself: value, readiness, waiting, less for large work and backfills
    score_why: str  #: the sum in words
    run_type: RunType
    team: str | None = None
    submitted_at: datetime
    waiting_s: float
    position: int | None
    reason_code: str | None
    reason: str | None
    starts_in_s: float | None
    preemptions: int = 0  #: how often its devices were taken back already


class LeaseRow(BaseModel):
    """A live lease for people; never carries the secret."""

    lease_id: str
    key: TaskKey
    request: RequestBody
    owner: str | None
    team: str | None = None
    devices: list[str]
    shares: list[float]  #: of each device, 1 = all of it
    nodes: list[str]
    granted_at: datetime
    expires_in_s: float
    epoch: int
    move: str | None = None  #: the move that it is offered
    taken_back: str | None = None  #: for whom it has to end, when and why


class DrainRow(BaseModel):
    """A drain for people."""

    scope: str  #: node | device
    target: str
    reason: str
    by: str
    since: datetime
    until: datetime | None


class ThroughputRow(BaseModel):
    """How fast a class of tasks was on a model."""

    task_class: str
    model: str
    runs: int
    units_per_s: float  #: a device, in the class's own unit
    rating: float | None  #: of the model
    speed: float | None  #: on the scale of the ratings; None = it does not count yet
    counts: bool
    why_not: str | None


class RedundancyRow(BaseModel):
    """How many redundant shards trainings get; of the whole fleet where no class is named."""

    task_class: str | None
    model: str | None
    share: float
    failure_rate: float
    reason: str


class ReservationRow(BaseModel):
    """A reservation for people."""

    id: str
    starts_at: datetime
    ends_at: datetime
    state: str  #: ahead | begun
    team: str | None
    dag_id: str | None
    devices: list[str]  #: named ones
    number: int  #: of devices that are asked, named or not
    model: str | None
    by: str
    reason: str
    kept: list[str]  #: devices that are kept now; fewer than asked where there are no more
    overstays: list[str]  #: tasks of others that still hold kept devices though it has begun


class Status(BaseModel):
    """What the connection's Test button shows."""

    version: str
    leader: str | None
    nodes: int
    devices: int
    free: float  #: free devices, and the free parts of shared ones
    pending: int
    leases: int
    trouble: str | None = None  #: what this replica cannot do, since when and why

    def __str__(self) -> str:
        """Return all of it in a sentence or two."""
        trouble = f". {self.trouble}" if self.trouble else ""
        return (
            f"GPU broker {self.version}: {self.nodes} nodes, {self.devices} devices, {self.free:g} free; "
            f"{self.leases} leases, {self.pending} claims waiting; leader {self.leader or 'none'}{trouble}"
        )
