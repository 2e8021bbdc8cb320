"""The values that the broker decides about.

Frozen, so that a decision can never change what it was decided on. Times are aware UTC datetimes and
always passed in; sizes are MiB, shares of a device are milli-GPU (1000 = the whole device). Unknown is
``None``, never 0. The next step, from these values to decisions, is `cycle.decide`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from airflow_gpu_provider.broker.reservation import Reservation

DeviceId = NewType("DeviceId", str)
NodeName = NewType("NodeName", str)
ClaimId = NewType("ClaimId", str)
LeaseId = NewType("LeaseId", str)

WHOLE_DEVICE = 1000


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU or MIG slice; its UUID is its name everywhere."""

    id: DeviceId
    node: NodeName
    model: str
    memory_mib: int
    tflops: float
    utilisation: float | None = None  #: 0..1
    memory_used_mib: int | None = None
    unavailable: str | None = None  #: why it is not offered (drained, suspect, foreign process), else None
    simulated: bool = False
    nvlink: str | None = None  #: its NVLink domain, a name unique on the node; None = none or unknown
    numa: int | None = None  #: the NUMA node of its host that it is attached to


@dataclass(frozen=True, slots=True)
class Node:
    """A named group of devices on one host. A host (a machine) may carry several nodes."""

    name: NodeName
    host: str
    cpu_cores: float
    memory_mib: int
    devices: tuple[Device, ...]
    load: float | None = None  #: CPU load, 0..1
    unavailable: str | None = None  #: why none of its devices is offered (drained, stale), else None
    labels: Mapping[str, str] = field(default_factory=dict)  #: "rack" and "zone" say where it stands
    latency_ms: Mapping[NodeName, float] = field(default_factory=dict)  #: to other nodes, where measured
    artifacts: frozenset[str] = frozenset()  #: pretrained models and data sets on its disk, by path or digest


@dataclass(frozen=True, slots=True)
class Fleet:
    """All nodes, including those that are drained or stale."""

    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """What a task asks for. A request for several devices is a gang: all of them or none.

    ``models`` filters hard (empty = any model). ``min_tflops`` asks softly: a weaker device matches with
    degree ``tflops / min_tflops`` and is a fallback, unless ``strict``. ``memory_mib`` is per device;
    ``cpu_cores`` and ``host_memory_mib`` are for the whole gang. ``spares`` are devices of the same kind
    that are added when idle at the moment of placement; they never delay the gang. With ``milli`` below 1000
    each member takes a share of a device beside others: the part that ``memory_mib`` is of the device, and at
    least ``milli``.
    """

    gpus: int = 1
    models: frozenset[str] = frozenset()
    memory_mib: int = 0
    min_tflops: float = 0.0
    strict: bool = False
    milli: int = WHOLE_DEVICE
    cpu_cores: float = 0.0
    host_memory_mib: int = 0
    host: str | None = None  #: only nodes of this host (local launcher)
    spares: int = 0
    max_runtime_s: float | None = None  #: the holder promises to end by then; lets it pass a blocked head
    task_class: str | None = None  #: what kind of work it is, for what was learned of such work
    artifacts: frozenset[str] = frozenset()  #: what it reads, by path or digest; nodes holding it are nearer
    artifacts_required: bool = False  #: only nodes that hold all of it
    node_labels: frozenset[str] = frozenset()  #: only nodes with these labels, "name=value"
    tolerates: frozenset[str] = frozenset()  #: taints of nodes that do not keep it off; "*" = all

    @property
    def is_shared(self) -> bool:
        """Whether members take parts of devices."""
        return self.milli < WHOLE_DEVICE

    @property
    def is_by_memory(self) -> bool:
        """Whether what a member takes of a device depends on the size of the device."""
        return self.milli < WHOLE_DEVICE and self.memory_mib > 0

    def milli_on(self, device_mib: int) -> int:
        """Return what a member takes of a device of this size; all of it where it is too small."""
        if not self.is_by_memory:
            return self.milli
        if device_mib < self.memory_mib:
            return WHOLE_DEVICE
        return max(self.milli, -(-WHOLE_DEVICE * self.memory_mib // device_mib))


class RunType(str, Enum):
    """How the DAG run came to be."""

    LIVE = "live"
    """Scheduled, triggered by hand or by an asset."""
    BACKFILL = "backfill"
    """A catalogue refresh over past intervals; runs below live work."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A stored request that waits for devices."""

    id: ClaimId
    request: GpuRequest
    submitted_at: datetime
    value: float = 0.0  #: business value, higher is sooner
    run_type: RunType = RunType.LIVE
    excluded: frozenset[DeviceId] = frozenset()  #: devices on which an earlier try failed
    team: str | None = None  #: whose quota it counts on; None = of no team
    dag_id: str | None = None  #: for reservations made for a DAG
    preemptible: bool = False  #: its devices may be taken back for more urgent work
    preemptions: int = 0  #: how often this work was preempted already; apart from the user's retries
    preempted_by: frozenset[ClaimId] = frozenset()  #: for whom; it may not take back from these
    admitted: bool = False  #: it was let in before: when the fleet shrinks it is not rejected at once
    impossible_since: datetime | None = None  #: since when the fleet cannot run it
    completes: float | None = None  #: part of its DAG run that is done once it is; None = unknown

    @property
    def task_class(self) -> str | None:
        """The kind of work, as its request says."""
        return self.request.task_class


@dataclass(frozen=True, slots=True)
class Lease:
    """Devices that a claim holds until ``expires_at``; only live leases are passed to the core."""

    id: LeaseId
    claim_id: ClaimId
    devices: tuple[DeviceId, ...]  #: members first, then spares
    request: GpuRequest
    granted_at: datetime
    expires_at: datetime
    #: milli-GPU of each device; empty = as much of each as the request says at least
    shares: tuple[int, ...] = ()
    #: whose it is (value, team, whether it may be taken back); None = unknown, then it is never taken back
    claim: Claim | None = None
    checkpoint_at: datetime | None = None  #: last checkpoint its holder reported; None = none since it began
    ends_for: ClaimId | None = None  #: the claim for which it is being taken back, within the grace period
    must_end_at: datetime | None = None  #: then it ends at the latest; None = it is not being taken back

    @property
    def milli(self) -> tuple[int, ...]:
        """What it holds of each device, in milli-GPU."""
        return self.shares or (self.request.milli,) * len(self.devices)

    @property
    def ends_by(self) -> datetime | None:
        """When the holder promised to be done, if it promised."""
        seconds = self.request.max_runtime_s
        return None if seconds is None else self.granted_at + timedelta(seconds=seconds)


@dataclass(frozen=True, slots=True)
class Placement:
    """A proposal: these devices for this claim."""

    claim_id: ClaimId
    devices: tuple[DeviceId, ...]
    spares: tuple[DeviceId, ...] = ()
    match_degree: float = 1.0  #: the weakest member's, 0..1
    shares: tuple[int, ...] = ()  #: milli-GPU of each device, then of each spare; empty = whole devices


class ReasonCode(str, Enum):
    """Why a claim was rejected or waits. Sentences are built in `reasons`."""

    # rejected: the whole fleet, empty, could not serve it
    NO_DEVICES = "no_devices"
    UNKNOWN_MODEL = "unknown_model"
    EXCEEDS_FLEET = "exceeds_fleet"
    EXCEEDS_MEMORY = "exceeds_memory"
    EXCEEDS_TFLOPS = "exceeds_tflops"
    EXCEEDS_HOST = "exceeds_host"
    EXCEEDS_LABELS = "exceeds_labels"
    UNKNOWN_HOST = "unknown_host"
    # pending: it fits the fleet, not now
    DEVICES_LEASED = "devices_leased"
    DEVICES_UNAVAILABLE = "devices_unavailable"
    NODES_BUSY = "nodes_busy"
    HOST_FULL = "host_full"
    BEHIND_HEAD = "behind_head"
    DEVICES_EXCLUDED = "devices_excluded"
    RESERVED = "reserved"
    OVER_QUOTA = "over_quota"
    DEVICES_TAKEN_BACK = "devices_taken_back"
    ARTIFACTS_ABSENT = "artifacts_absent"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True, slots=True)
class Reason:
    """A code with its numbers in one sentence: asked, available, what to change."""

    code: ReasonCode
    text: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Where a pending claim stands."""

    claim_id: ClaimId
    position: int  #: 1 = next
    reason: Reason
    starts_in_s: float | None = None  #: expected, from what live leases promised; None = unknown
    impossible_since: datetime | None = None  #: the fleet shrank, and could not run it even when empty


@dataclass(frozen=True, slots=True)
class Rejection:
    """A claim that no emptying of this fleet could ever serve."""

    claim_id: ClaimId
    reason: Reason


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that one cycle decides on."""

    fleet: Fleet
    leases: tuple[Lease, ...]
    claims: tuple[Claim, ...]
    #: what was asked for lately, for the cost of fragmentation; empty = what is live and pending now
    recent: tuple[GpuRequest, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    kept: Mapping[str, frozenset[DeviceId]] = field(default_factory=dict)  #: until now, by reservation
    taken_back: tuple[
        Lease, ...
    ] = ()  #: ended leases whose devices are kept for the claims that they end for


@dataclass(frozen=True, slots=True)
class CyclePolicy:
    """Settings of the cycle, see the configuration reference for their meaning."""

    max_load: float = 0.5
    ageing_per_min: float = 0.02
    small_first: float = 1.0
    readiness_boost: float = 0.5
    backfill_penalty: float = 1000.0
    cost_band: float = 50.0
    reservation_notice: timedelta = timedelta(hours=1)
    impossible_for: timedelta = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Preemption:
    """Leases to end by ``end_by`` for a claim."""

    for_claim: ClaimId
    victims: tuple[LeaseId, ...]  #: the least loss first
    loss_s: float  #: device-seconds of work that is done again
    end_by: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class Decisions:
    """What a cycle decided; the leader writes all of it in one transaction."""

    placements: tuple[Placement, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    expired: tuple[LeaseId, ...] = ()
    lapsed: tuple[LeaseId, ...] = ()  #: leases whose offer to move ran out
    preemptions: tuple[Preemption, ...] = ()  #: leases that have to end for others
    spared: tuple[LeaseId, ...] = ()  #: leases that had to end and no longer have to
