"""The schedulers that are compared: the broker's core, and what people use without it.

The baselines are simple and meant well: they know which devices suit a claim by kind, labels and taints,
never grant one twice, take a whole gang or nothing and never mix models in it. They reckon neither with
cores, host memory and hosts nor with shares of devices: a share gets a whole device, as a pool's slot does.
The next step is `simulator.simulate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import lru_cache, partial
from typing import Protocol, TypeAlias

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.layout import Kind
from airflow_gpu_provider.broker.model import (
    Claim,
    ClaimId,
    CyclePolicy,
    DeviceId,
    Fleet,
    GpuRequest,
    Lease,
    LeaseId,
    Placement,
)
from airflow_gpu_provider.broker.quota import NO_QUOTAS, Quotas
from airflow_gpu_provider.broker.reservation import Kept
from airflow_gpu_provider.broker.throughput import Throughput, ThroughputTable
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.simulation.baseline import Baseline, by_arrival, by_value, kinds_of, suits
from airflow_gpu_provider.simulation.simulator import Scheduler
from airflow_gpu_provider.simulation.task import START, Task

#: Finished tasks after which what was learned is put to use.
_LEARNS_AFTER = 25
_NEVER = datetime.max.replace(tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True)
class Rules:
    """What an installation set: how claims are ranked, and what teams own."""

    policy: CyclePolicy = field(default_factory=CyclePolicy)
    quotas: Quotas = NO_QUOTAS


_DEFAULT = Rules()


class Ours:
    """The broker's engine, told and asked as the server's leader does."""

    def __init__(
        self, fleet: Fleet, policy: CyclePolicy | None = None, *, quotas: Quotas = NO_QUOTAS
    ) -> None:
        self.engine = Engine(policy or CyclePolicy(), fleet, quotas=quotas)
        self._claims: dict[ClaimId, Claim] = {}

    def hold(self, claim: Claim, devices: tuple[DeviceId, ...], started: datetime) -> None:
        """Learn a claim that holds devices already."""
        self.engine.granted(Placement(claim.id, devices), _lease(claim, devices, started))

    def reserve(self, kept: Sequence[Kept]) -> None:
        """Take what people reserved ahead, and go on with the devices that are kept for it."""
        before = {each.reservation.id: each.devices for each in kept}
        self.engine.reserve([each.reservation for each in kept], before)

    def submit(self, claim: Claim) -> None:
        """Queue a claim."""
        self._claims[claim.id] = claim
        self.engine.submit(claim)

    def withdraw(self, claim_id: ClaimId) -> None:
        """Forget a claim that waits."""
        self.engine.withdraw(claim_id)
        self._claims.pop(claim_id, None)

    def end(self, claim_id: ClaimId, now: datetime, *, model: str, runtime_s: float) -> None:
        """End the lease of a claim."""
        self.engine.end(LeaseId(claim_id))

    def turn(self, now: datetime) -> tuple[tuple[Placement, ...], tuple[ClaimId, ...]]:
        """Decide, and grant all of it: nobody else writes here."""
        decisions = self.engine.turn(now)
        for placement in decisions.placements:
            claim = self._claims.pop(placement.claim_id)
            devices = placement.devices + placement.spares
            self.engine.granted(placement, _lease(claim, devices, now, placement.shares))
        rejected = tuple(rejection.claim_id for rejection in decisions.rejections)
        for claim_id in rejected:
            self._claims.pop(claim_id, None)
        return decisions.placements, rejected


class OursLearning(Ours):
    """The same, and it learns from each finished task how fast its class is on each model.

    A task counts as one unit of work of its class, so a class should be tasks of about equal work; ``known``
    are runs of before.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: CyclePolicy | None = None,
        known: Iterable[Throughput] = (),
        *,
        quotas: Quotas = NO_QUOTAS,
    ) -> None:
        super().__init__(fleet, policy, quotas=quotas)
        self._table = ThroughputTable(known)
        self._unread = 0
        self._classes: dict[ClaimId, str] = {}
        self._read(START)

    def submit(self, claim: Claim) -> None:
        """Queue a claim."""
        super().submit(claim)
        if claim.task_class is not None:
            self._classes[claim.id] = claim.task_class

    def end(self, claim_id: ClaimId, now: datetime, *, model: str, runtime_s: float) -> None:
        """End the lease of a claim and note how long it took."""
        super().end(claim_id, now, model=model, runtime_s=runtime_s)
        task_class = self._classes.pop(claim_id, None)
        if task_class is None or runtime_s <= 0:
            return
        self._table.add(Throughput(task_class, model, 1.0 / runtime_s, now))
        self._unread += 1
        if self._unread >= _LEARNS_AFTER:
            self._read(now)

    def _read(self, now: datetime) -> None:
        self._unread = 0
        self.engine.learn(self._table.learned(now))


def _lease(claim: Claim, devices: tuple[DeviceId, ...], now: datetime, shares: tuple[int, ...] = ()) -> Lease:
    return Lease(LeaseId(claim.id), claim.id, devices, claim.request, now, _NEVER, shares, claim)


def fifo(fleet: Fleet, tasks: Sequence[Task], _rules: Rules = _DEFAULT) -> Scheduler:
    """Return one queue for the whole fleet, strictly by arrival: nobody passes a task that does not fit.

    A task gets the suitable kind of which most is free.
    """
    return Baseline(fleet, rank=by_arrival, prefer=_most_free, is_passable=False)


def tflops_only(fleet: Fleet, tasks: Sequence[Task], _rules: Rules = _DEFAULT) -> Scheduler:
    """Return one queue by value and arrival, in which all that fits starts, on the fastest by TFLOPS."""
    return Baseline(fleet, rank=by_value, prefer=_fastest, is_passable=True)


def pools(fleet: Fleet, tasks: Sequence[Task], _rules: Rules = _DEFAULT) -> Scheduler:
    """Return a pool of slots for each model, as Airflow's: by value and arrival, all that fits starts.

    Each kind of task of each DAG is bound to one pool beforehand, so that the pools get equal work: whoever
    bound them knew all tasks to come, which favours the pools.
    """
    bound = bind(tasks, fleet)

    def only(claim: Claim, kinds: Sequence[Kind], _free: Mapping[Kind, int]) -> list[Kind]:
        kind = bound.get(_lot(claim.request, claim.dag_id))
        return [each for each in kinds if each == kind]

    return Baseline(fleet, rank=by_value, prefer=only, is_passable=True)


#: What an author binds to a pool: tasks of one DAG that ask for the same.
_Lot: TypeAlias = tuple[GpuRequest, str | None]


def _lot(request: GpuRequest, dag_id: str | None) -> _Lot:
    return replace(request, spares=0, max_runtime_s=None), dag_id


def bind(tasks: Sequence[Task], fleet: Fleet) -> Mapping[_Lot, Kind]:
    """Return the pool of each lot: the largest first, each where the work per device then is least."""
    work: dict[_Lot, dict[Kind, float]] = {}
    sizes, served = kinds_of(fleet), lru_cache(maxsize=None)(partial(kinds_of, fleet))
    for task in tasks:
        lot = _lot(task.request, task.dag_id)
        of_lot = work.setdefault(lot, {})
        for kind, size in served(lot[0]).items():
            if size >= task.request.gpus and suits(task.request, kind):
                of_lot[kind] = of_lot.get(kind, 0.0) + task.request.gpus * task.runtime_on([kind.model])
    given = dict.fromkeys(sizes, 0.0)
    bound: dict[_Lot, Kind] = {}
    for lot, of_lot in sorted(work.items(), key=lambda item: -min(item[1].values(), default=0.0)):
        if of_lot:
            best = min(of_lot, key=lambda kind: ((given[kind] + of_lot[kind]) / sizes[kind], kind))
            given[best] += of_lot[best]
            bound[lot] = best
    return bound


def _most_free(_claim: Claim, kinds: Sequence[Kind], free: Mapping[Kind, int]) -> list[Kind]:
    return sorted(kinds, key=lambda kind: (-free[kind], kind))


def _fastest(_claim: Claim, kinds: Sequence[Kind], _free: Mapping[Kind, int]) -> list[Kind]:
    return sorted(kinds, key=lambda kind: (-kind.tflops, kind))


def ours(fleet: Fleet, tasks: Sequence[Task], rules: Rules = _DEFAULT) -> Scheduler:
    """Return the broker's core, as it is set."""
    return Ours(fleet, rules.policy, quotas=rules.quotas)


def measured(fleet: Fleet, tasks: Sequence[Task], rules: Rules = _DEFAULT) -> Scheduler:
    """Return the broker's core, which begins without knowledge and learns as tasks finish."""
    return OursLearning(fleet, rules.policy, quotas=rules.quotas)


class _Make(Protocol):
    def __call__(self, fleet: Fleet, tasks: Sequence[Task], rules: Rules = ..., /) -> Scheduler: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to share the fleet, by the name that the command line knows."""

    name: str
    about: str
    make: _Make  #: only the broker knows ``rules``


POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("ours", "the broker", ours),
        Policy("measured", "the broker, placing by the speeds that it measured", measured),
        Policy("fifo", "one queue, strictly in order of arrival", fifo),
        Policy("pools", "a pool of slots for each model, tasks bound to one beforehand", pools),
        Policy("tflops", "one queue, the fastest free device by TFLOPS", tflops_only),
    )
}


def chosen(names: str) -> tuple[Policy, ...]:
    """Return the policies of a list such as ``ours,fifo``."""
    found = []
    for name in (part.strip() for part in names.split(",")):
        if name not in POLICIES:
            raise InvalidRequest(
                f"There is no policy {name!r}; write some of {', '.join(POLICIES)}, with commas between",
                reason="unknown_policy",
            )
        found.append(POLICIES[name])
    return tuple(dict.fromkeys(found))
