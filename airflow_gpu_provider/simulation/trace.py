"""Read tasks for the simulator from a file: CSV with a header, or JSON lines (``.jsonl``, ``.ndjson``).

Both have the same columns; all but ``arrives_s`` and a run time may be left out or empty:

``task`` name, unique · ``arrives_s`` · ``runtime_s`` on any model · ``runtime_s.MODEL`` on one model (in JSON
also ``runtime_s: {"A100": 60}``) · ``gpus`` · ``model`` (``A100|H100``) · ``memory`` (``16GiB``, of each
device) · ``min_tflops`` · ``strict`` · ``cpu_cores`` · ``host_memory`` · ``max_runtime`` promised seconds ·
``spares`` · ``value`` · ``run_type`` (live or backfill) · ``team`` · ``dag`` · ``task_class`` ·
``preemptible`` · ``queue_timeout_s``. A wrong cell is refused with its row, its column and what is allowed.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from airflow_gpu_provider.broker.flavors import canonical_model
from airflow_gpu_provider.broker.model import GpuRequest, RunType
from airflow_gpu_provider.broker.request import build_request
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.simulation.task import Task

_OF_REQUEST = (
    "gpus",
    "model",
    "memory",
    "min_tflops",
    "strict",
    "cpu_cores",
    "host_memory",
    "spares",
    "max_runtime",
)
_OF_TASK = (
    "task",
    "arrives_s",
    "runtime_s",
    "value",
    "run_type",
    "team",
    "dag",
    "task_class",
    "preemptible",
    "queue_timeout_s",
)
_BY_MODEL = "runtime_s."
_JSON_LINES = frozenset({".jsonl", ".ndjson"})

_Row = Mapping[str, object]


def read_trace(path: Path) -> tuple[Task, ...]:
    """Return the tasks of a file in the order of their arrival."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The trace {str(path)!r} cannot be read: {error}") from error
    rows = _json_rows(path, text) if path.suffix in _JSON_LINES else _csv_rows(path, text)
    tasks: dict[str, Task] = {}
    for where, row in rows:
        task = _task(where, row, f"task-{len(tasks) + 1}")
        if task.id in tasks:
            raise InvalidRequest(f"{where}, column task: {task.id!r} is there twice; names must differ")
        tasks[task.id] = task
    if not tasks:
        raise InvalidRequest(
            f"The trace {str(path)!r} has no tasks; write at least arrives_s,runtime_s and a row 0,60"
        )
    return tuple(sorted(tasks.values(), key=lambda task: task.arrives_s))


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, _Row]]:
    reader = csv.DictReader(text.splitlines())
    for row in reader:
        where = f"{path.name}, row {reader.line_num}"
        if None in row:
            raise InvalidRequest(
                f"{where}: it has more cells than the header has columns; put a cell with a comma in quotes"
            )
        yield where, row


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, _Row]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path.name}, row {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InvalidRequest(f"{where}: it is no JSON ({error}); write an object a line") from error
        if not isinstance(row, dict):
            raise InvalidRequest(f'{where}: it is no object; write e.g. {{"arrives_s": 0, "runtime_s": 60}}')
        yield where, row


def _task(where: str, row: _Row, name: str) -> Task:
    cells = {column: cell for column, cell in row.items() if cell is not None and cell != ""}
    _check_columns(where, cells)
    runtime_s, by_model = _runtimes(where, cells)
    return Task(
        id=str(cells.get("task", name)),
        arrives_s=_seconds(where, "arrives_s", cells.get("arrives_s"), least=0.0),
        request=_request(where, cells),
        runtime_s=runtime_s,
        runtime_by_model=by_model,
        value=_number(where, "value", cells.get("value", 0.0)),
        run_type=_run_type(where, cells.get("run_type", RunType.LIVE.value)),
        team=_text(cells, "team"),
        dag_id=_text(cells, "dag"),
        preemptible=_flag(where, "preemptible", cells.get("preemptible", False)),
        queue_timeout_s=(
            _seconds(where, "queue_timeout_s", cells["queue_timeout_s"])
            if "queue_timeout_s" in cells
            else None
        ),
    )


def _check_columns(where: str, cells: _Row) -> None:
    for column in cells:
        if column not in _OF_REQUEST and column not in _OF_TASK and not column.startswith(_BY_MODEL):
            raise InvalidRequest(
                f"{where}: there is no column {column!r}; known are "
                f"{', '.join(sorted((*_OF_TASK, *_OF_REQUEST)))} and {_BY_MODEL}MODEL"
            )


def _request(where: str, cells: _Row) -> GpuRequest:
    try:
        request = build_request(**{column: cells[column] for column in _OF_REQUEST if column in cells})  # type: ignore[arg-type]
    except InvalidRequest as wrong:
        raise InvalidRequest(f"{where}: {wrong.message}", reason=wrong.reason) from wrong
    return replace(request, task_class=_text(cells, "task_class"))


def _runtimes(where: str, cells: _Row) -> tuple[float | None, dict[str, float]]:
    of_all = cells.get("runtime_s")
    given = dict(of_all) if isinstance(of_all, dict) else {}
    given.update(
        (column.removeprefix(_BY_MODEL), cell)
        for column, cell in cells.items()
        if column.startswith(_BY_MODEL)
    )
    by_model = {
        canonical_model(model): _seconds(where, f"{_BY_MODEL}{model}", cell) for model, cell in given.items()
    }
    if isinstance(of_all, dict) or of_all is None:
        if not by_model:
            raise InvalidRequest(
                f"{where}, column runtime_s: it is empty; write how many seconds the task really runs, or "
                f"one number for each model in columns such as {_BY_MODEL}A100"
            )
        return None, by_model
    return _seconds(where, "runtime_s", of_all), by_model


def _number(where: str, column: str, cell: object) -> float:
    number = math.nan
    if isinstance(cell, (int, float, str)) and not isinstance(cell, bool):
        try:
            number = float(cell)
        except ValueError:
            number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(f"{where}, column {column}: {cell!r} is not a number; write digits, e.g. 60")
    return number


def _seconds(where: str, column: str, cell: object, *, least: float | None = None) -> float:
    """Return a length of time above 0, or not below ``least`` where that is given."""
    if cell is None:
        raise InvalidRequest(f"{where}, column {column}: it is missing; write seconds, e.g. 0 or 90.5")
    number = _number(where, column, cell)
    if least is not None and number < least:
        raise InvalidRequest(f"{where}, column {column}: {cell!r} is too small; the least is {least:g} s")
    if least is None and number <= 0:
        raise InvalidRequest(f"{where}, column {column}: {cell!r} is not above 0; write seconds, e.g. 60")
    return number


def _run_type(where: str, cell: object) -> RunType:
    try:
        return RunType(str(cell).strip().lower())
    except ValueError:
        allowed = " or ".join(each.value for each in RunType)
        raise InvalidRequest(f"{where}, column run_type: {cell!r} is unknown; write {allowed}") from None


def _flag(where: str, column: str, cell: object) -> bool:
    text = str(cell).strip().lower()
    if text not in ("true", "false"):
        raise InvalidRequest(f"{where}, column {column}: {cell!r} is unknown; write true or false")
    return text == "true"


def _text(cells: _Row, column: str) -> str | None:
    return str(cells[column]) if column in cells else None
