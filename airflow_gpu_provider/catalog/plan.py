"""Decide once per run which products are to be done, in which order and in which chunks.

The whole manifest is checked before the first file of the plan is put in place. Products whose published
version was made by the same stages, parameters and row are listed as reused and cost no task. Rows go
through a file, not through memory: planning a million products takes some 130 MiB, most of it to notice a
sku that stands twice. Next step: `runner`, which reads a chunk's lines by offset.
"""

from __future__ import annotations

import json
import logging
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO

from airflow_gpu_provider.catalog.atomic import replacing, write_json
from airflow_gpu_provider.catalog.chunks import (
    MAX_CHUNKS,
    Chunk,
    chunk_bounds,
    effective_chunk_size,
    value_order,
)
from airflow_gpu_provider.catalog.layout import ProductFolders, RunFolders, version_name
from airflow_gpu_provider.catalog.ledger import Status, read_outcome
from airflow_gpu_provider.catalog.manifest import VALUE_COLUMNS, read_manifest
from airflow_gpu_provider.catalog.stage import Stage, chained_fingerprint
from airflow_gpu_provider.exceptions import InvalidRequest, ManifestInvalid

log = logging.getLogger(__name__)

#: Enough to see what was meant.
_LISTED_CATEGORIES = 20


@dataclass(frozen=True, slots=True)
class Selection:
    """Which products of the manifest a run is about."""

    limit: int | None = None  #: only so many, the most valuable first
    categories: tuple[str, ...] = ()  #: only these; empty = all
    value_columns: tuple[str, ...] = VALUE_COLUMNS  #: the product of these columns is the value
    redo: bool = False  #: do products again although their published version fits


@dataclass(frozen=True, slots=True)
class PlannedProduct:
    """One product version of a run."""

    sku: str
    updated_at: datetime
    value: float
    row: dict[str, str]

    @property
    def version(self) -> str:
        """Name of this product version."""
        return version_name(self.updated_at)

    def as_line(self) -> bytes:
        """Return the product as a JSON line."""
        content = {
            "sku": self.sku,
            "updated_at": self.updated_at.isoformat(),
            "value": self.value,
            "row": self.row,
        }
        return json.dumps(content, ensure_ascii=False).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> PlannedProduct:
        """Read what `as_line` wrote."""
        raw = json.loads(line)
        return cls(raw["sku"], datetime.fromisoformat(raw["updated_at"]), raw["value"], raw["row"])


@dataclass(frozen=True, slots=True)
class Plan:
    """The header of a plan; the products stand in files beside it."""

    run_id: str
    catalog: str
    output: str
    stages: tuple[str, ...]
    started_at: str
    products: int
    reused: int
    chunk_size: int
    notes: tuple[str, ...] = ()

    @property
    def folders(self) -> RunFolders:
        """The run's paths."""
        return RunFolders(Path(self.output), self.run_id)

    @property
    def results(self) -> ProductFolders:
        """The paths of results, over all runs."""
        return ProductFolders(Path(self.output))

    def as_json(self) -> dict[str, object]:
        """Return plain values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def load_plan(path: Path) -> Plan:
    """Read a plan's header."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return Plan(**{**raw, "stages": tuple(raw["stages"]), "notes": tuple(raw["notes"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"plan {path} cannot be read ({error}); the output folder must be shared by all workers, and "
            "a run whose folder was removed must start anew"
        ) from error


def read_products(path: Path, *, offset: int = 0, count: int | None = None) -> Iterator[PlannedProduct]:
    """Yield products of a plan's file from a byte offset on."""
    with path.open("rb") as lines:
        lines.seek(offset)
        for position, line in enumerate(lines):
            if count is not None and position >= count:
                return
            yield PlannedProduct.from_line(line)


@dataclass(slots=True)
class _Lines:
    """Where the lines of a file of products begin, and their values; 16 bytes a product."""

    offsets: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def append(self, out: IO[bytes], product: PlannedProduct) -> None:
        """Write the product's line and remember it."""
        self.offsets.append(out.tell())
        self.values.append(product.value)
        out.write(product.as_line())


def write_plan(
    catalog: Path,
    folders: RunFolders,
    stages: Sequence[Stage],
    *,
    chunk_size: int,
    started_at: datetime,
    selection: Selection | None = None,
    weight: float = 1.0,
) -> tuple[Plan, list[Chunk]]:
    """Check the manifest, write the plan below the run's folder and return it with its chunks.

    ``weight`` multiplies the values that the chunks present to the broker, not the order within the run.
    """
    selection = selection or Selection()
    catalog = catalog.absolute()
    folders = RunFolders(folders.output.absolute(), folders.run_id)
    folders.root.mkdir(parents=True, exist_ok=True)
    # Has no name, so that nothing is left of it however this process ends.
    with tempfile.TemporaryFile(dir=folders.root) as rows:
        found = _gather(catalog, rows, selection)
        order = value_order(found.values)[: selection.limit]
        todo = _write_ordered(
            rows, [found.offsets[position] for position in order], folders, stages, selection
        )
    size = effective_chunk_size(len(todo.values), chunk_size)
    plan = Plan(
        run_id=folders.run_id,
        catalog=str(catalog),
        output=str(folders.output),
        stages=tuple(stage.name for stage in stages),
        started_at=started_at.isoformat(),
        products=len(todo.values),
        reused=len(order) - len(todo.values),
        chunk_size=size,
        notes=_notes(len(todo.values), chunk_size, size),
    )
    write_json(folders.plan, plan.as_json(), indent=2)
    for note in plan.notes:
        log.warning("%s", note)
    log.info("%s: %d products to do, %d reused, chunk size %d", catalog, plan.products, plan.reused, size)
    return plan, list(_cut(folders, todo, size, weight))


def _gather(catalog: Path, rows: IO[bytes], selection: Selection) -> _Lines:
    """Write the selected products in file order; raise `ManifestInvalid` when the manifest is bad."""
    found = _Lines()
    wanted = {name.casefold() for name in selection.categories}
    categories: set[str] = set()
    for row in read_manifest(catalog, value_columns=selection.value_columns):
        category = row.row["category"]
        if len(categories) < _LISTED_CATEGORIES:
            categories.add(category)
        if not wanted or category.casefold() in wanted:
            found.append(rows, PlannedProduct(row.sku, row.updated_at, row.value, dict(row.row)))
    if not found.values:
        raise ManifestInvalid(
            f"{catalog}: no product is in the categories {', '.join(selection.categories)}; it has "
            f"{', '.join(sorted(categories))}"
        )
    return found


def _write_ordered(
    rows: IO[bytes],
    offsets: Sequence[int],
    folders: RunFolders,
    stages: Sequence[Stage],
    selection: Selection,
) -> _Lines:
    """Write the products, in the order of ``offsets``, as to do or as reused; return those to do."""
    results = ProductFolders(folders.output)
    todo, kept = _Lines(), _Lines()
    with (
        replacing(folders.todo) as todo_path,
        replacing(folders.reused) as kept_path,
        todo_path.open("wb") as todo_file,
        kept_path.open("wb") as kept_file,
    ):
        for offset in offsets:
            rows.seek(offset)
            product = PlannedProduct.from_line(rows.readline())
            if not selection.redo and _fits(results, product, stages):
                kept.append(kept_file, product)
            else:
                todo.append(todo_file, product)
    return todo


def _fits(results: ProductFolders, product: PlannedProduct, stages: Sequence[Stage]) -> bool:
    """Tell whether the published version is what these stages would make of this row."""
    record = read_outcome(results.record(product.sku, product.version))
    if record is None or record.status is not Status.DONE:
        return False
    return record.fingerprint == chained_fingerprint(stages, version=product.version, row=product.row)


def _notes(products: int, asked: int, size: int) -> tuple[str, ...]:
    if size == asked:
        return ()
    return (
        f"chunk_size {asked} would make {-(-products // asked)} mapped tasks a stage; at most {MAX_CHUNKS} "
        f"are allowed, so chunks have {size} products",
    )


def _cut(folders: RunFolders, todo: _Lines, size: int, weight: float) -> Iterator[Chunk]:
    for index, (first, count) in enumerate(chunk_bounds(len(todo.values), size)):
        head = next(read_products(folders.todo, offset=todo.offsets[first], count=1))
        label = head.sku if count == 1 else f"{head.sku} and {count - 1} more"
        yield Chunk(index, str(folders.plan), todo.offsets[first], count, head.value * weight, label)
