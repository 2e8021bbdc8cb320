"""`make demo`: product catalogue in, 3D models out, on a real Airflow that ends with the demo.

It starts the stack, triggers the main DAG by Airflow's API like any user, shows the run's own files as a live
progress bar, and prints what came out. Exit code: 0 when every product that should work did, 1 otherwise, 130
after Ctrl-C. Invariant: whatever happens, no process that it started is left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from scripts import fleet
from scripts.airflow_home import ROOT, AirflowHome
from scripts.errors import StackError
from scripts.processes import die_with_parent
from scripts.progress import ProgressDisplay, RunView
from scripts.rest import FINAL_STATES, BrokerApi
from scripts.stack import Stack, StackOptions

DAG_ID = "product_catalog_models"
FOLDER = ROOT / ".demo"
POLL_S = 0.5
WIDTH_OF_A_LOG = 120
#: A second demo shows as much as the first; small chunks keep all devices busy to the end.
CONF = {"redo": True, "chunk_size": 2}


class Demo:
    """One run of the demo on a running stack."""

    def __init__(self, stack: Stack, console: Console, output: Path) -> None:
        self._stack = stack
        self._console = console
        self._output = output

    def run(self, conf: Mapping[str, object]) -> bool:
        """Run the DAG and print what came out; return whether all that should work did."""
        self._stack.wait_for_dag(DAG_ID)
        self._end_interrupted_runs()
        run_id = self._stack.api.trigger(DAG_ID, {**conf, "output": str(self._output)})
        self._console.print(f"run {run_id} of {DAG_ID}", highlight=False)
        view = RunView(self._output, run_id)
        state = self._follow(run_id, view)
        if view.folders.summary.exists():
            self._console.print(results_table(json.loads(view.folders.summary.read_text())))
            self._console.print(f"gallery: {view.folders.gallery / 'index.html'}", soft_wrap=True)
        if state != "success":
            self._explain_failure(run_id)
        return state == "success"

    def _end_interrupted_runs(self) -> None:
        """End what an interrupted demo left half done in the database; it would compete with this run."""
        for dag_id, run_id in self._stack.api.unfinished_runs():
            if dag_id == DAG_ID:
                self._console.print(f"run {run_id} of an interrupted demo is marked as failed")
                self._stack.api.end_run(dag_id, run_id)

    def _follow(self, run_id: str, view: RunView) -> str:
        broker = self._stack.broker("admin")
        with ProgressDisplay(self._console) as display:
            while True:
                state = self._stack.api.run_state(DAG_ID, run_id)
                leased, devices = count_devices(broker)
                display.show(view.read(), leased=leased, devices=devices)
                if state in FINAL_STATES:
                    broker.close()
                    return state
                self._stack.raise_if_failed()
                time.sleep(POLL_S)

    def _explain_failure(self, run_id: str) -> None:
        failed = [t for t in self._stack.api.task_instances(DAG_ID, run_id) if t["state"] == "failed"]
        for task in failed[:3]:
            log = self._stack.api.task_log(task).strip().splitlines()
            self._console.print(f"[red]task {task['task_display_name']} failed[/red]; the end of its log:")
            self._console.print("\n".join(f"  {line}" for line in log[-8:]), markup=False, highlight=False)


def count_devices(broker: BrokerApi) -> tuple[int, int]:
    """Return (leased, all) devices."""
    states = [device["state"] for node in broker.nodes() for device in node["devices"]]
    return states.count("leased"), len(states)


def results_table(summary: Mapping[str, Any]) -> Table:
    """Return the table of all products, hot ones first."""
    table = Table(title=f"{len(summary['products'])} products")
    for heading, justify in (
        ("product", "left"),
        ("status", "left"),
        ("IoU", "right"),
        ("PSNR dB", "right"),
        ("seconds", "right"),
        ("device", "left"),
        ("remark", "left"),
    ):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    colours = {"done": "green", "below_threshold": "yellow", "unusable": "yellow"}
    for entry in summary["products"]:
        figures, colour = entry["figures"], colours.get(entry["status"], "red")
        table.add_row(
            entry["title"],
            f"[{colour}]{entry['status'].replace('_', ' ')}[/{colour}]",
            number(figures.get("iou"), ".3f"),
            number(figures.get("psnr"), ".1f"),
            number(sum(s or 0.0 for s in entry["seconds"].values()), ".1f"),
            entry["device_model"] or "N/A",
            first_line(entry["reason"]),
        )
    return table


def number(value: object, form: str) -> str:
    """Return a figure as text; unknown is N/A, never 0."""
    return format(value, form) if isinstance(value, int | float) else "N/A"


def first_line(reason: str | None) -> str:
    """Return what a reason begins with; the report has all of it."""
    return (reason or "").partition("\n")[0][:60]


def start(stack: Stack, console: Console) -> None:
    """Start the stack, saying what is still awaited."""
    with console.status("starting Airflow and the GPU broker") as status:
        begun = time.monotonic()
        stack.start()
        stack.wait_ready(report=lambda missing: status.update(f"waiting for {', '.join(missing)}"))
    console.print(f"Airflow is ready after {time.monotonic() - begun:.0f} s at {stack.url}", highlight=False)


def announce(stack: Stack, console: Console) -> None:
    """Say on which fleet the demo runs."""
    broker = stack.broker("admin")
    console.print(f"[bold]{fleet.announcement(broker.nodes())}[/bold]", highlight=False)
    broker.close()


def end_like_ctrl_c() -> None:
    """Let every way to end the demo be the one of Ctrl-C, which ends the stack."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, interrupt)
    if "MAKELEVEL" in os.environ:
        die_with_parent(signal.SIGTERM)  # make was killed: nobody is waiting for this demo any more


def why_silent(stack: Stack, error: httpx.HTTPError) -> str:
    """Return why Airflow stopped answering: what ended the stack, when that is known."""
    try:
        stack.raise_if_failed()
    except StackError as failure:
        return str(failure)
    return f"Airflow stopped answering ({error}); see {stack.home.logs}"


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(description="Product catalogue in, 3D models out, on a real Airflow.")
    parser.add_argument("--catalog", type=Path, help="catalogue to run on; default: the sample")
    parser.add_argument("--limit", type=int, help="only so many products, the hottest first")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where everything is kept")
    arguments = parser.parse_args()
    end_like_ctrl_c()
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_OF_A_LOG)
    conf: dict[str, object] = dict(CONF)
    if arguments.catalog:
        conf["catalog"] = str(arguments.catalog.resolve())
    if arguments.limit:
        conf["limit"] = arguments.limit
    stack = Stack(StackOptions(home=AirflowHome(arguments.folder / "airflow")))
    try:
        if not stack.is_in_background:
            start(stack, console)
        announce(stack, console)
        return 0 if Demo(stack, console, arguments.folder.resolve() / "output").run(conf) else 1
    except StackError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except httpx.HTTPError as error:
        print(f"demo: {why_silent(stack, error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    finally:
        if stack.is_ours:
            for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(signum, signal.SIG_IGN)  # ending takes seconds; a second Ctrl-C must not cut it
            stack.stop()


if __name__ == "__main__":
    raise SystemExit(main())
