"""How far a run of the product catalogue is, read from its ledger; the files are the truth, not Airflow.

Invariant: reading changes nothing and believes only finished outcomes, so a view may begin or end at any
time. Next step: `scripts.demo` shows it and, at the end, the run's summary.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from airflow_gpu_provider.catalog.layout import RunFolders
from airflow_gpu_provider.catalog.ledger import Ledger, Status
from airflow_gpu_provider.catalog.plan import Plan, load_plan, read_products

SECONDS_BETWEEN_LINES = 10.0  # where no terminal can redraw a bar


@dataclass
class RunProgress:
    """What is known of a run at one moment."""

    products: int = 0
    done: int = 0
    failed: int = 0
    reused: int = 0
    share: float = 0.0  #: of the work, by the seconds that finished stages took
    elapsed_s: float = 0.0
    at_work: Counter[str] = field(default_factory=Counter)  #: products by the stage they are in

    @property
    def left(self) -> int:
        """Products whose fate is open."""
        return self.products - self.done - self.failed

    @property
    def eta_s(self) -> float | None:
        """Return the seconds until the end if the rest goes like the part that is done."""
        if self.share <= 0.02:  # the first seconds say nothing yet
            return None
        return max(0.0, self.elapsed_s * (1 - self.share) / self.share)


class RunView:
    """Follows one run through its folder."""

    def __init__(self, output: Path, run_id: str) -> None:
        self.folders = RunFolders(output, run_id)
        self._plan: Plan | None = None
        self._skus: list[str] = []

    def read(self) -> RunProgress | None:
        """Return the progress; None before the plan is there."""
        if self._plan is None:
            if not self.folders.plan.exists():
                return None
            self._plan = load_plan(self.folders.plan)
            self._skus = [product.sku for product in read_products(self.folders.todo)]
        return self._tally(self._plan)

    def _tally(self, plan: Plan) -> RunProgress:
        progress = RunProgress(
            products=plan.products, reused=plan.reused, elapsed_s=_seconds_since(plan.started_at)
        )
        ledger = Ledger(self.folders)
        tally = StageTally(plan.stages)
        for sku in self._skus:
            for stage in plan.stages:
                outcome = ledger.read(stage, sku)
                if outcome is None:
                    break
                if outcome.status is Status.RUNNING:
                    progress.at_work[stage] += 1
                    tally.running[stage].append(_seconds_since(outcome.started_at))
                if outcome.status is not Status.DONE:
                    given_up = outcome.status in (Status.FAILED, Status.UNUSABLE)
                    progress.failed += given_up
                    tally.closed.update(plan.stages[plan.stages.index(stage) :] if given_up else ())
                    break
                tally.closed[stage] += 1
                tally.took[stage].append(outcome.seconds or 0.0)
            else:
                progress.done += 1
        progress.share = tally.share(plan.products)
        return progress


class StageTally:
    """How long stages take and how much of them is done, over the products of a run."""

    def __init__(self, stages: tuple[str, ...]) -> None:
        self.took: dict[str, list[float]] = {stage: [] for stage in stages}
        self.running: dict[str, list[float]] = {stage: [] for stage in stages}  #: seconds so far
        self.closed: Counter[str] = Counter()  #: needs no more work: done, or its product is given up

    def share(self, products: int) -> float:
        """Return the share of all work that is done, each stage weighing the seconds it takes."""
        if not products or not any(self.took.values()):
            return 0.0
        weight = {stage: self._expected(stage) for stage in self.took}
        done = sum(weight[stage] * count for stage, count in self.closed.items())
        begun = sum(min(s, 0.9 * weight[stage]) for stage, so_far in self.running.items() for s in so_far)
        return (done + begun) / (products * sum(weight.values()) or 1.0)

    def _expected(self, stage: str) -> float:
        """Return the mean; a stage that nobody has finished is taken for twice as long as it already runs."""
        if self.took[stage]:
            return sum(self.took[stage]) / len(self.took[stage])
        seen = [sum(took) / len(took) for took in self.took.values() if took]
        return max([*seen, *(2 * s for s in self.running[stage])])


def _seconds_since(moment: str) -> float:
    return (datetime.now(timezone.utc) - datetime.fromisoformat(moment)).total_seconds()


class ProgressDisplay:
    """Shows progress: a bar that is redrawn on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_line_at = 0.0
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%  {task.fields[words]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("products", total=1.0, words="planning")

    def __enter__(self) -> ProgressDisplay:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def show(self, progress: RunProgress | None, *, leased: int, devices: int) -> None:
        """Show the run as it is now."""
        words = describe(progress, leased=leased, devices=devices)
        share = progress.share if progress else 0.0
        self._bar.update(self._task, completed=share, words=words)
        if not self._console.is_terminal and self._bar.get_time() >= self._next_line_at:
            self._console.print(words, highlight=False)
            self._next_line_at = self._bar.get_time() + SECONDS_BETWEEN_LINES


def describe(progress: RunProgress | None, *, leased: int, devices: int) -> str:
    """Return the progress in words."""
    fleet = f"{leased} of {devices} devices leased"
    if progress is None:
        return f"planning · {fleet}"
    eta = "ETA —" if progress.eta_s is None else f"ETA {progress.eta_s:.0f} s"
    reused = f" · {progress.reused} reused" if progress.reused else ""
    counts = f"{progress.done} done · {progress.failed} failed · {progress.left} left{reused}"
    return f"{counts} · {fleet} · {eta}"
