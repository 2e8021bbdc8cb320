"""Build catalogues, plans and runs for the tests, in a few words."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from airflow_gpu_provider.catalog.chunks import Chunk
from airflow_gpu_provider.catalog.layout import RunFolders
from airflow_gpu_provider.catalog.plan import Plan, Selection, read_products, write_plan
from airflow_gpu_provider.catalog.runner import run_chunk
from airflow_gpu_provider.catalog.stage import Stage
from airflow_gpu_provider.catalog.stage_run import ChunkReport, StageRun

COLUMNS = ("sku", "title", "category", "price", "daily_views", "updated_at", "views", "does")
START = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)


def row(sku: str, **fields: object) -> dict[str, str]:
    """Return a good row; name what differs."""
    usual = {
        "sku": sku,
        "title": f"The {sku}",
        "category": "chairs",
        "price": 10,
        "daily_views": 5,
        "updated_at": "2026-11-01T08:00:00Z",
        "views": f"views/{sku}",
        "does": "",
    }
    return {name: str(value) for name, value in {**usual, **fields}.items()}


def write_catalog(folder: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    """Write a catalogue and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "catalog.csv"
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def toy_stages(steps: object = 10) -> list[Stage]:
    """Return the three toy stages."""
    return [
        Stage("prepare", "toy_stages:prepare"),
        Stage("fit", "toy_stages:fit", params={"steps": steps}, gpus=1),
        Stage("show", "toy_stages:show"),
    ]


def make_plan(
    folder: Path,
    rows: Sequence[Mapping[str, str]],
    *,
    run_id: str = "run-1",
    chunk_size: int = 100,
    steps: object = 10,
    selection: Selection | None = None,
) -> tuple[Plan, list[Chunk]]:
    """Write a catalogue and plan a run over it."""
    return write_plan(
        write_catalog(folder / "in", rows),
        RunFolders(folder / "out", run_id),
        toy_stages(steps),
        chunk_size=chunk_size,
        started_at=START,
        selection=selection,
    )


def run_stage(
    plan: Plan,
    stage: str,
    *,
    steps: object = 10,
    entrypoint: str | None = None,
    check: Callable[[], None] = lambda: None,
) -> ChunkReport:
    """Run one stage over all products of the plan."""
    run = StageRun(
        plan,
        stage,
        entrypoint or f"toy_stages:{stage}",
        params={"steps": steps} if stage == "fit" else {},
        device="sim-0" if stage == "fit" else "cpu",
        device_model="A100" if stage == "fit" else "CPU",
    )
    return run_chunk(read_products(plan.folders.todo), run, check=check)


def run_all(plan: Plan, *, steps: object = 10) -> list[ChunkReport]:
    """Run all stages over all products."""
    return [run_stage(plan, stage, steps=steps) for stage in plan.stages]


def called(folder: Path, stage: str) -> list[str]:
    """Return the skus for which a toy stage was called, in order."""
    path = folder / "in" / f"calls-{stage}.txt"
    return path.read_text().split() if path.exists() else []
