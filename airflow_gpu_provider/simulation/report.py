"""What a run of the simulator says: how soon, how long waited, how full, how many late or failed.

A task is *delayed* because of others when it waited longer than it would have with the fleet to itself, where
it starts at once, by more than the larger of a minute and a tenth of its shortest run time there. Who got a
slower device than the best is not delayed, but completes later. Times are of tasks that started: a policy
that fails many looks better in them than it is, hence the failed stand beside. The next step is `plot.save`,
or a table of the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from airflow_gpu_provider.broker.matching import accepts
from airflow_gpu_provider.broker.model import Fleet, GpuRequest
from airflow_gpu_provider.simulation.simulator import End, Run
from airflow_gpu_provider.simulation.task import Task

#: What nobody calls a delay: the larger of these.
TOLERATED_S = 60.0
TOLERATED_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one run; None = no task of that sort."""

    tasks: int
    finished: int
    failed: int  #: rejected, timed out or never started
    delayed: int  #: waited because of others, failed ones left out
    makespan_s: float  #: from the start of the simulation to the last end
    wait_mean_s: float | None
    wait_p50_s: float | None
    wait_p95_s: float | None
    completion_mean_s: float | None  #: from arrival to end
    utilisation: float  #: leased share of the fleet until the last end, 0..1

    @property
    def delayed_or_failed(self) -> int:
        """The tasks that others did harm to."""
        return self.delayed + self.failed


def report(run: Run, fleet: Fleet, of: Callable[[Task], bool] = lambda _: True) -> Report:
    """Return the figures of the tasks that ``of`` picks; utilisation is of the whole fleet."""
    outcomes = [outcome for outcome in run.outcomes if of(outcome.task)]
    ran = [outcome for outcome in outcomes if outcome.end is End.FINISHED]
    alone = _Alone(fleet)
    waits = np.array([outcome.waited_s for outcome in ran])
    completions = np.array([outcome.ended_s - outcome.task.arrives_s for outcome in ran])
    makespan_s = max((outcome.ended_s for outcome in ran), default=0.0)
    return Report(
        tasks=len(outcomes),
        finished=len(ran),
        failed=len(outcomes) - len(ran),
        delayed=sum(outcome.waited_s > alone.tolerated_s(outcome.task) for outcome in ran),
        makespan_s=makespan_s,
        wait_mean_s=float(waits.mean()) if ran else None,
        wait_p50_s=float(np.percentile(waits, 50)) if ran else None,
        wait_p95_s=float(np.percentile(waits, 95)) if ran else None,
        completion_mean_s=float(completions.mean()) if ran else None,
        utilisation=_utilisation(run),
    )


def _utilisation(run: Run) -> float:
    until_s = max((outcome.ended_s for outcome in run.outcomes), default=0.0)
    if not until_s or not run.devices:
        return 0.0
    times = [min(at, until_s) for at, _ in run.busy] + [until_s]
    leased_s = sum(
        load * (after - at) for (_, load), at, after in zip(run.busy, times, times[1:], strict=False)
    )
    return leased_s / (run.devices * until_s)


def load_curve(run: Run, points: int = 400) -> list[tuple[float, float]]:
    """Return the mean leased share of the fleet, 0..1, in equal slices of the time until the last end."""
    end_s = max((outcome.ended_s for outcome in run.outcomes), default=0.0)
    if not end_s or not run.devices:
        return []
    at = np.array([seconds for seconds, _ in run.busy])
    load = np.array([leased for _, leased in run.busy])
    # The integral of a step function between any two moments, from its running sum.
    total = np.concatenate([[0.0], np.cumsum(load[:-1] * np.diff(at))])
    edges = np.linspace(0.0, end_s, points + 1)
    step = np.searchsorted(at, edges, side="right") - 1
    area = total[step] + load[step] * (edges - at[step])
    means = np.diff(area) / np.diff(edges) / run.devices
    middles = (edges[:-1] + edges[1:]) / 2
    return [(float(x), float(y)) for x, y in zip(middles, means, strict=True)]


class _Alone:
    """How tasks would do with the fleet to themselves."""

    def __init__(self, fleet: Fleet) -> None:
        self._kinds = {(d.model, d.memory_mib, d.tflops) for node in fleet.nodes for d in node.devices}
        self._models: dict[GpuRequest, tuple[str, ...]] = {}

    def tolerated_s(self, task: Task) -> float:
        """Return what is no delay yet."""
        return max(TOLERATED_S, TOLERATED_SHARE * self._runtime_s(task))

    def _runtime_s(self, task: Task) -> float:
        models = self._models.get(task.request)
        if models is None:
            models = self._models[task.request] = tuple(self._suitable(task.request))
        return min((task.runtime_on([model]) for model in models), default=0.0)

    def _suitable(self, request: GpuRequest) -> Iterable[str]:
        for model, memory_mib, tflops in sorted(self._kinds):
            if accepts(request, model=model, memory_mib=memory_mib, tflops=tflops):
                yield model
