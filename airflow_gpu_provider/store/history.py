"""What finished runs told of themselves, for those that follow: speeds reached, shards lost.

A row for each lease whose holder told something, written in the transaction that ends the lease. Only speeds
that can be compared are kept: of work that ended well, on real devices of one model that were the same
all the time. The rows outlive their claims and are forgotten after the same time. The next step is
`server.history`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, Row, delete, func, select

from airflow_gpu_provider.broker.flavors import canonical_model
from airflow_gpu_provider.broker.model import WHOLE_DEVICE, NodeName
from airflow_gpu_provider.broker.redundancy import RunOutcome
from airflow_gpu_provider.broker.throughput import Throughput
from airflow_gpu_provider.reports import DeviceReport, NodeReport
from airflow_gpu_provider.store.engine import writing
from airflow_gpu_provider.store.script import Script
from airflow_gpu_provider.store.tables import run
from airflow_gpu_provider.wire import DONE, ReleaseBody, RequestBody

#: A device and its node as reported; None = nobody reports it any more.
DeviceOf = Callable[[str], tuple[DeviceReport, NodeReport] | None]

_FORGOTTEN_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A row of history."""

    lease_id: str
    task_class: str | None
    model: str | None  #: None = of several models
    devices: int  #: members, without spares
    nodes: tuple[str, ...]
    work: float | None
    work_s: float | None
    shards: int | None
    failures: int
    failed_on: tuple[str, ...]
    ended_at: datetime

    def throughput(self) -> Throughput | None:
        """Return the speed that each device reached; None = it tells none."""
        if not (self.work and self.work_s and self.task_class and self.model):
            return None
        units_per_s = self.work / self.work_s / self.devices
        return Throughput(self.task_class, self.model, units_per_s, self.ended_at)

    def outcome(self) -> RunOutcome | None:
        """Return what became of the shards; None = it had none."""
        if self.shards is None:
            return None
        return RunOutcome(
            task_class=self.task_class,
            model=self.model,
            nodes=tuple(map(NodeName, self.nodes)),
            shards=self.shards,
            failures=self.failures,
            at=self.ended_at,
            failed_on=tuple(map(NodeName, self.failed_on)),
        )


def finished_run(
    told: ReleaseBody,
    *,
    lease_id: str,
    request: RequestBody,
    members: Sequence[str],
    was_changed: bool,
    device_of: DeviceOf,
    now: datetime,
) -> FinishedRun | None:
    """Return the row of a lease that ends; None = there is nothing to learn from it."""
    known = [each for device in members if (each := device_of(device)) is not None]
    if not told.tells_history or not known:
        return None
    models = {canonical_model(device.model) for device, _ in known}
    is_comparable = (
        told.outcome == DONE
        and not was_changed  # part of the work was done on other devices
        and len(models) == 1
        and len(known) == len(members)
        and request.milli == WHOLE_DEVICE
        and not any(device.simulated for device, _ in known)
    )
    if told.shards is None and not is_comparable:
        return None
    return FinishedRun(
        lease_id=lease_id,
        task_class=request.task_class,
        model=models.pop() if len(models) == 1 else None,
        devices=len(members),
        nodes=tuple(sorted({*(node.name for _, node in known), *told.failed_on})),
        work=told.work if is_comparable else None,
        work_s=told.work_s if is_comparable else None,
        shards=told.shards,
        failures=told.failures,
        failed_on=told.failed_on,
        ended_at=now,
    )


def run_row(told: FinishedRun) -> dict[str, Any]:
    """Return the row of the table."""
    return asdict(told)


def add_runs(script: Script, runs: Sequence[FinishedRun], otherwise: Exception) -> None:
    """Write rows of leases that have none yet."""
    if runs:
        script.insert_new(run, [run_row(each) for each in runs], otherwise)


class RunStore:
    """The table of finished runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def newest(self, of_each: int) -> list[FinishedRun]:
        """Return the newest runs of each class and model, oldest first."""
        newer = (
            func.row_number()
            .over(partition_by=(run.c.task_class, run.c.model), order_by=run.c.ended_at.desc())
            .label("newer")
        )
        ranked = select(run, newer).subquery()
        statement = select(ranked).where(ranked.c.newer <= of_each).order_by(ranked.c.ended_at)
        with self._engine.connect() as connection:
            return [_run(row) for row in connection.execute(statement)]

    def since(self, moment: datetime) -> list[FinishedRun]:
        """Return the runs that ended since then, oldest first."""
        statement = select(run).where(run.c.ended_at >= moment).order_by(run.c.ended_at)
        with self._engine.connect() as connection:
            return [_run(row) for row in connection.execute(statement)]

    def forget_before(self, moment: datetime) -> int:
        """Delete some of what ended before then; return how many."""
        old = select(run.c.lease_id).where(run.c.ended_at < moment).limit(_FORGOTTEN_AT_ONCE)
        with writing(self._engine) as connection:
            return connection.execute(delete(run).where(run.c.lease_id.in_(old))).rowcount


_FIELDS = tuple(each.name for each in fields(FinishedRun))


def _run(row: Row[Any]) -> FinishedRun:
    found = dict(zip(_FIELDS, row, strict=False))  # a rank may follow
    found["nodes"], found["failed_on"] = tuple(found["nodes"]), tuple(found["failed_on"])
    return FinishedRun(**found)
