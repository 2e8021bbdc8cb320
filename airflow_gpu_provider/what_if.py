"""`airflow gpu simulate`: run a scene by each policy, show the figures and plot them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from airflow_gpu_provider.broker.flavors import FLAVORS, Flavor
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.scenes import Scene, enlarged
from airflow_gpu_provider.simulation import plot
from airflow_gpu_provider.simulation.policies import Ours, Rules, chosen
from airflow_gpu_provider.simulation.report import Report, report
from airflow_gpu_provider.simulation.simulator import Run, simulate

_AS_IS = "as is"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One policy on one fleet."""

    policy: str
    fleet: str
    run: Run
    report: Report

    @property
    def title(self) -> str:
        """Its name in a plot."""
        return self.policy if self.fleet == _AS_IS else f"{self.policy}, {self.fleet}"


def compare(
    what: Scene,
    policies: str,
    *,
    add: str | None = None,
    dag_id: str | None = None,
    flavors: Mapping[str, Flavor] = FLAVORS,
    rules: Rules | None = None,
) -> tuple[Comparison, ...]:
    """Return the figures of each policy on the fleet, and on the fleet with what is added.

    ``policies`` are names such as "ours,fifo". With ``dag_id`` the figures are of the tasks of one DAG; all
    others run as well. ``rules`` are those of the installation.
    """
    names, rules = chosen(policies), rules or Rules()
    every = [*what.tasks, *(each.task for each in what.running)]
    if not every:
        raise InvalidRequest(
            "Nothing waits and nothing runs: give --trace to simulate tasks to come",
            reason="nothing_to_simulate",
        )
    dags = {task.dag_id or "" for task in every}
    if dag_id is not None and dag_id not in dags:
        raise InvalidRequest(
            f"No task is of DAG {dag_id!r}; there are {', '.join(sorted(filter(None, dags))[:10]) or 'none'}",
            reason="unknown_dag",
        )
    fleets, notice = {_AS_IS: what.fleet}, rules.policy.reservation_notice
    if add is not None:
        fleets[f"+ {add}"] = enlarged(what.fleet, add, flavors)
    found = []
    for policy in names:
        for name, fleet in fleets.items():
            scheduler = policy.make(fleet, what.tasks, rules)
            if isinstance(scheduler, Ours):
                scheduler.reserve(what.reservations)
            run = simulate(fleet, what.tasks, scheduler, what.running, what.wakes_s(notice))
            figures = report(run, fleet, lambda task: dag_id is None or task.dag_id == dag_id)
            found.append(Comparison(policy.name, name, run, figures))
    return tuple(found)


def rows_for_programs(comparisons: Sequence[Comparison]) -> list[dict[str, object]]:
    """Return the figures, times in seconds; None = no task of that sort."""
    return [
        {
            "policy": each.policy,
            "fleet": each.fleet,
            **{name: _rounded(value) for name, value in asdict(each.report).items()},
        }
        for each in comparisons
    ]


def rows_for_people(comparisons: Sequence[Comparison]) -> list[dict[str, object]]:
    """Return the figures as a table for people."""
    return [_row(each.policy, each.fleet, each.report) for each in comparisons]


def _row(policy: str, fleet: str, figures: Report) -> dict[str, object]:
    return {
        "policy": policy,
        "fleet": fleet,
        "done in": length(figures.makespan_s),
        "finished": figures.finished,
        "failed": figures.failed,
        "delayed": figures.delayed,
        "wait p50": length(figures.wait_p50_s),
        "wait p95": length(figures.wait_p95_s),
        "mean wait": length(figures.wait_mean_s),
        "mean completion": length(figures.completion_mean_s),
        "leased": f"{figures.utilisation:.0%}",
    }


def length(seconds: float | None) -> str:
    """Return a length of time for people: "2d 3h", "1h 05m", "45 s"."""
    if seconds is None:
        return "N/A"
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes = round(seconds / 60)
    days, hours = divmod(minutes // 60, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes % 60:02d}m" if hours else f"{minutes}m"


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def check_plot(path: str | None) -> None:
    """Refuse a plot that could not be saved, before anything is simulated."""
    if path is not None:
        plot.check(Path(path))


def save_plot(path: str | None, comparisons: Sequence[Comparison]) -> None:
    """Save the runs as a plot where one is asked for."""
    if path is not None:
        runs = {each.title: each.run for each in comparisons}
        tasks = comparisons[0].report.tasks
        plot.save(Path(path), runs, rows_for_people(comparisons), title=f"{tasks} tasks, simulated")
