"""Run tasks through a scheduler on a virtual clock, from event to event.

An event is the arrival of a task, its end, the end of its patience, or a planned turn. All that happens at
one moment is told before the scheduler gets its turn, as the leader of the broker does. No chance and no real
time: the same tasks on the same fleet give the same run. A scheduler that grants a device twice or a part of
a gang is a bug in it, and stops the run. The next step is `report.report`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import Protocol

from airflow_gpu_provider.broker.matching import accepts
from airflow_gpu_provider.broker.model import (
    WHOLE_DEVICE,
    Claim,
    ClaimId,
    Device,
    DeviceId,
    Fleet,
    GpuRequest,
    Placement,
)
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.simulation.task import Running, Task, moment


class Scheduler(Protocol):
    """Who decides: the broker's core, or something simpler to compare it with."""

    def hold(self, claim: Claim, devices: tuple[DeviceId, ...], started: datetime) -> None:
        """Learn a claim that holds devices already."""

    def submit(self, claim: Claim) -> None:
        """Queue a claim."""

    def withdraw(self, claim_id: ClaimId) -> None:
        """Forget a claim that waits."""

    def end(self, claim_id: ClaimId, now: datetime, *, model: str, runtime_s: float) -> None:
        """Take the devices of a claim back; it ran so long, on this model at the slowest."""

    def turn(self, now: datetime) -> tuple[tuple[Placement, ...], tuple[ClaimId, ...]]:
        """Return what starts now, and what can never start."""


class End(str, Enum):
    """How a task ended."""

    FINISHED = "finished"
    REJECTED = "rejected"
    """The scheduler said at once that the fleet can never run it."""
    TIMED_OUT = "timed_out"
    """It waited longer than its ``queue_timeout_s``."""
    NEVER_STARTED = "never_started"
    """It still waited when nothing ran and nothing was to come any more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a task; times are virtual seconds, None = it never started."""

    task: Task
    end: End
    ended_s: float
    started_s: float | None = None
    devices: tuple[DeviceId, ...] = ()

    @property
    def waited_s(self) -> float:
        """How long it waited, until it started or was given up."""
        return (self.ended_s if self.started_s is None else self.started_s) - self.task.arrives_s


@dataclass(frozen=True, slots=True)
class Run:
    """All outcomes, in the order in which the tasks ended, and the load of the fleet over time."""

    outcomes: tuple[Outcome, ...]
    devices: int
    #: (second, leased devices from then on), shares counted as shares
    busy: tuple[tuple[float, float], ...]


def simulate(
    fleet: Fleet,
    tasks: Iterable[Task],
    scheduler: Scheduler,
    running: Sequence[Running] = (),
    wakes_s: Iterable[float] = (),
) -> Run:
    """Return what becomes of the tasks, those that run already included.

    The scheduler also gets its turn at each second of ``wakes_s``: when reservations begin or end.
    """
    arriving = sorted(tasks, key=lambda task: (task.arrives_s, task.id))
    _check_runtimes(fleet, [*arriving, *(each.task for each in running)])
    world = _World(fleet, scheduler)
    for each in running:
        world.resume(each)
    for task in arriving:
        world.expect(task)
    for second in wakes_s:
        world.wake(second)
    world.run()
    return Run(tuple(world.outcomes), _offered(fleet), tuple(world.busy))


def _offered(fleet: Fleet) -> int:
    open_nodes = (node for node in fleet.nodes if node.unavailable is None)
    return sum(device.unavailable is None for node in open_nodes for device in node.devices)


def _check_runtimes(fleet: Fleet, tasks: Iterable[Task]) -> None:
    """Refuse a task that may run where its run time is unknown, before an hour of simulation."""
    kinds = {(d.model, d.memory_mib, d.tflops) for node in fleet.nodes for d in node.devices}
    suits: dict[GpuRequest, tuple[str, ...]] = {}
    for task in tasks:
        models = suits.get(task.request)
        if models is None:
            models = suits[task.request] = tuple(
                sorted(m for m, size, t in kinds if accepts(task.request, model=m, memory_mib=size, tflops=t))
            )
        for model in models:
            if not task.knows(model):
                task.runtime_on([model])


# Of what happens at one moment the ends come first, so that what arrives finds the devices free.
_ENDS, _ARRIVES, _GIVES_UP, _WAKES = range(4)


@dataclass(slots=True)
class _World:
    """The state of one simulation."""

    fleet: Fleet
    scheduler: Scheduler
    outcomes: list[Outcome] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)
    _events: list[tuple[float, int, str]] = field(default_factory=list)
    _tasks: dict[str, Task] = field(default_factory=dict)
    _waiting: dict[str, Task] = field(default_factory=dict)
    _started: dict[str, tuple[float, tuple[DeviceId, ...], str]] = field(default_factory=dict)
    _devices: dict[DeviceId, Device] = field(default_factory=dict)
    _milli: dict[DeviceId, int] = field(default_factory=dict)  #: in use
    _load: int = 0

    def __post_init__(self) -> None:
        self._devices = {device.id: device for node in self.fleet.nodes for device in node.devices}
        self._milli = dict.fromkeys(self._devices, 0)

    def expect(self, task: Task) -> None:
        """Plan an arrival; what arrived before the start waits at the start."""
        self._know(task)
        self._events.append((max(0.0, task.arrives_s), _ARRIVES, task.id))

    def wake(self, second: float) -> None:
        """Plan a turn."""
        self._events.append((max(0.0, second), _WAKES, ""))

    def resume(self, running: Running) -> None:
        """Take over what holds devices."""
        self._know(running.task)
        self.scheduler.hold(running.task.claim(), running.devices, moment(running.started_s))
        self._take(running.task, running.devices, running.started_s)
        self._events.append((max(0.0, running.left_s), _ENDS, running.task.id))

    def run(self) -> None:
        """Go from moment to moment until nothing is to come."""
        heapify(self._events)
        self.busy.append((0.0, self._load / WHOLE_DEVICE))
        now_s = 0.0
        while self._events:
            now_s = self._events[0][0]
            while self._events and self._events[0][0] == now_s:
                _, kind, task_id = heappop(self._events)
                if kind != _WAKES:
                    self._tell(kind, task_id, now_s)
            self._turn(now_s)
        for task in self._waiting.values():
            self.outcomes.append(Outcome(task, End.NEVER_STARTED, now_s))

    def _know(self, task: Task) -> None:
        if task.id in self._tasks:
            raise InvalidRequest(f"Task {task.id!r} is there twice; give each task its own name")
        self._tasks[task.id] = task

    def _tell(self, kind: int, task_id: str, now_s: float) -> None:
        task = self._tasks[task_id]
        if kind == _ENDS:
            self._end(task, now_s)
        elif kind == _ARRIVES:
            self._waiting[task_id] = task
            self.scheduler.submit(task.claim())
            if task.queue_timeout_s is not None:
                gives_up = max(now_s, task.arrives_s + task.queue_timeout_s)
                heappush(self._events, (gives_up, _GIVES_UP, task_id))
        elif self._waiting.pop(task_id, None) is not None:
            self.scheduler.withdraw(ClaimId(task_id))
            self.outcomes.append(Outcome(task, End.TIMED_OUT, now_s))

    def _turn(self, now_s: float) -> None:
        placements, rejected = self.scheduler.turn(moment(now_s))
        for claim_id in rejected:
            self.outcomes.append(Outcome(self._waiting.pop(claim_id), End.REJECTED, now_s))
        for placement in placements:
            task = self._waiting.pop(placement.claim_id)
            if len(placement.devices) != task.request.gpus:
                raise AssertionError(f"{task.id} asked {task.request.gpus} devices, got {placement.devices}")
            self._take(task, placement.devices + placement.spares, now_s)
            heappush(self._events, (now_s + self._runtime(task, placement.devices), _ENDS, task.id))
        self._note(now_s)

    def _runtime(self, task: Task, devices: Iterable[DeviceId]) -> float:
        return task.runtime_on(self._devices[device].model for device in devices)

    def _take(self, task: Task, devices: tuple[DeviceId, ...], now_s: float) -> None:
        for device in devices:
            self._milli[device] += self._part(task, device)
            self._load += self._part(task, device)
            if self._milli[device] > WHOLE_DEVICE:
                raise AssertionError(f"{device} is given to {task.id} and to others, together above 1")
        members = devices[: task.request.gpus]
        slowest = max(members, key=lambda device: self._runtime(task, [device]))
        self._started[task.id] = (now_s, devices, self._devices[slowest].model)

    def _part(self, task: Task, device: DeviceId) -> int:
        return task.request.milli_on(self._devices[device].memory_mib)

    def _end(self, task: Task, now_s: float) -> None:
        started_s, devices, model = self._started.pop(task.id)
        for device in devices:
            self._milli[device] -= self._part(task, device)
            self._load -= self._part(task, device)
        self.outcomes.append(Outcome(task, End.FINISHED, now_s, started_s, devices))
        self.scheduler.end(ClaimId(task.id), moment(now_s), model=model, runtime_s=now_s - started_s)

    def _note(self, now_s: float) -> None:
        load = self._load / WHOLE_DEVICE
        if self.busy[-1][0] == now_s:
            self.busy[-1] = (now_s, load)
        elif self.busy[-1][1] != load:
            self.busy.append((now_s, load))
