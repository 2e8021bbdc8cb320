"""Tell what became of every product of a run, from the plan and the ledger alone.

Nothing is hidden: products that are unusable, below their threshold, failed or never reached each have their
status and reason. Reading changes nothing, so a summary can be made at any time, also of a half-done run.
Next step: a page made from the summary by whoever knows the workload.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from airflow_gpu_provider.catalog.atomic import write_json
from airflow_gpu_provider.catalog.ledger import Ledger, Outcome, Status
from airflow_gpu_provider.catalog.plan import Plan, PlannedProduct, read_products

log = logging.getLogger(__name__)

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp"})

STATUSES = ("done", "below_threshold", "unusable", "failed", "missing")

#: Statuses of products that should have worked; a run with one of them is not a success.
BROKEN = ("failed", "missing")


def build_summary(plan: Plan, *, finished_at: datetime) -> dict[str, object]:
    """Return the run's summary with all products, the most valuable first."""
    products = [_entry(plan, product) for product in _all_products(plan)]
    # The two files are each in order already; a stable sort merges them.
    products.sort(key=lambda entry: -_number(entry["value"]))
    return {
        "run_id": plan.run_id,
        "started_at": plan.started_at,
        "finished_at": finished_at.isoformat(),
        "catalog": plan.catalog,
        "notes": list(plan.notes),
        "counts": count_statuses(products),
        "products": products,
    }


def write_summary(plan: Plan, *, finished_at: datetime) -> dict[str, object]:
    """Write the summary into the run's folder and return it."""
    summary = build_summary(plan, finished_at=finished_at)
    write_json(plan.folders.summary, summary, indent=1)
    return summary


def count_statuses(products: Sequence[Mapping[str, object]]) -> dict[str, int]:
    """Return how many products have each status; all statuses are named."""
    counted = Counter(str(entry["status"]) for entry in products)
    return {status: counted[status] for status in STATUSES}


def broken_sentence(products: Sequence[Mapping[str, object]]) -> str | None:
    """Name the products that should have worked and did not (the first 10), or return None."""
    broken = [entry for entry in products if entry["status"] in BROKEN]
    if not broken:
        return None
    named = [f"{entry['sku']} ({str(entry['reason']).partition(chr(10))[0]:.200})" for entry in broken[:10]]
    more = f" and {len(broken) - 10} more" if len(broken) > 10 else ""
    return (
        f"{len(broken)} of {len(products)} products are not done: {'; '.join(named)}{more}; the others are "
        "kept, so a new run does only these"
    )


def _all_products(plan: Plan) -> Iterator[PlannedProduct]:
    yield from read_products(plan.folders.todo)
    yield from read_products(plan.folders.reused)


def _entry(plan: Plan, product: PlannedProduct) -> dict[str, object]:
    outcomes = _outcomes(plan, product)
    status, reason = _status(plan, outcomes)
    worked = status in ("done", "below_threshold")
    last = outcomes[-1] if outcomes else None
    device = _telling_device(outcomes)
    return {
        "sku": product.sku,
        "title": product.row.get("title") or product.sku,
        "category": product.row.get("category", ""),
        "value": product.value,
        "version": product.version,
        "status": status,
        "reason": reason,
        "photo": find_photo(product.row, Path(plan.catalog).parent),
        "output_dir": str(plan.results.version(product.sku, product.version)) if worked else None,
        "figures": dict(last.figures) if last else {},
        "seconds": {outcome.stage: outcome.seconds for outcome in outcomes},
        "device": device.device if device else None,
        "device_model": device.device_model if device else None,
        "run_id": last.run_id if last else None,
    }


def _outcomes(plan: Plan, product: PlannedProduct) -> list[Outcome]:
    """Return the outcomes of this product version in the order of the stages, as far as it came."""
    ledger = Ledger(plan.folders)
    found = [ledger.read(stage, product.sku) for stage in plan.stages]
    if not any(found):
        found = _recorded(plan, product)
    return [outcome for outcome in found if outcome is not None and outcome.version == product.version]


def _recorded(plan: Plan, product: PlannedProduct) -> list[Outcome | None]:
    """Return the outcomes of the earlier run whose published version is reused."""
    record = plan.results.record(product.sku, product.version)
    try:
        return [Outcome.from_json(raw) for raw in json.loads(record.read_text(encoding="utf-8"))["stages"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        log.warning("record %s is damaged: %s", record, error)
        return []


def _status(plan: Plan, outcomes: Sequence[Outcome]) -> tuple[str, str | None]:
    stuck = next((outcome for outcome in outcomes if outcome.status is not Status.DONE), None)
    if stuck is not None:
        if stuck.status in (Status.UNUSABLE, Status.FAILED):
            return stuck.status.value, f"{stuck.stage}: {stuck.reason}"
        return "missing", f"{stuck.stage} did not end: {stuck.reason or 'its process was stopped'}"
    if not outcomes or outcomes[-1].stage != plan.stages[-1]:
        waiting = plan.stages[len(outcomes)] if len(outcomes) < len(plan.stages) else plan.stages[-1]
        return "missing", f"{waiting} was never begun; see its task's log"
    figures = outcomes[-1].figures
    if figures.get("below_threshold") is True:
        return "below_threshold", str(figures.get("reason") or "its figures are below the threshold")
    return "done", None


def _telling_device(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the outcome whose device is worth telling: a leased one before the CPU, else the last."""
    leased = [outcome for outcome in outcomes if outcome.device != "cpu"]
    candidates = leased or outcomes
    return candidates[-1] if candidates else None


def find_photo(row: Mapping[str, str], input_dir: Path) -> str | None:
    """Return the first image in a folder that the row names, whatever its column is called."""
    for value in row.values():
        folder = input_dir / value
        if not value or value in (".", "/") or not folder.is_dir():
            continue
        images = sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
        if images:
            return str(images[0])
    return None


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
