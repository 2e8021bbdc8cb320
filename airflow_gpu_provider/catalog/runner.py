"""Run one stage over a chunk, product by product, and lose nothing whatever happens.

A bad product never stops the others: it is recorded and the next one begins. What is not the product's fault
(lease lost, disk full) stops the chunk at once and is not counted against the product. A guard keeps an
orphan of an earlier try and its retry off the same product. No Airflow here; the operator calls `run_chunk`.
Next step: `summary`.
"""

from __future__ import annotations

import errno
import logging
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace

from airflow_gpu_provider.catalog.atomic import guarded
from airflow_gpu_provider.catalog.figures import checked_figures
from airflow_gpu_provider.catalog.handover import discard_scratch, hand_over, point, prepare
from airflow_gpu_provider.catalog.ledger import Ledger, Outcome, Status, now_text
from airflow_gpu_provider.catalog.plan import PlannedProduct
from airflow_gpu_provider.catalog.product import ProductUnusable
from airflow_gpu_provider.catalog.stage import StageFunction, load_entrypoint
from airflow_gpu_provider.catalog.stage_run import ChunkReport, StageRun
from airflow_gpu_provider.catalog.standing import Standing, look_up

log = logging.getLogger(__name__)

#: Faults of the machine, not of the product that met them: no space, over quota, read-only.
_HOST_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})

#: A reason keeps its head (what) and its tail (where); the middle of a traceback says least.
_REASON_HEAD, _REASON_TAIL = 500, 1200


def has_work(products: Iterable[PlannedProduct], run: StageRun) -> bool:
    """Tell whether the stage would be called for any product; if not, no device need be asked for."""
    return any(look_up(product, run).is_pending for product in products)


def run_chunk(
    products: Iterable[PlannedProduct], run: StageRun, *, check: Callable[[], None] = lambda: None
) -> ChunkReport:
    """Run the stage over all products; ``check`` is called between products and may raise to stop."""
    function = load_entrypoint(run.entrypoint)
    report = ChunkReport()
    for product in products:
        check()
        with guarded(run.plan.folders.guard(product.sku), check):
            _run_product(product, run, function, report, check)
    return report


def _run_product(
    product: PlannedProduct,
    run: StageRun,
    function: StageFunction,
    report: ChunkReport,
    check: Callable[[], None],
) -> None:
    ledger = Ledger(run.plan.folders)
    standing = look_up(product, run)
    if standing.is_skipped:
        report.skipped += 1
        return
    if standing.settled is not None:
        _keep(product, run, ledger, standing, standing.settled)
        report.count(standing.settled, run, reused=True)
        return
    former = standing.former
    begun = Outcome(
        sku=product.sku,
        version=product.version,
        stage=run.stage,
        status=Status.RUNNING,
        attempt=(former.attempt if former else 0) + 1,
        fingerprint=standing.fingerprint,
        started_at=now_text(),
        device=run.device,
        device_model=run.device_model,
        run_id=run.plan.run_id,
    )
    ledger.write(begun)
    ended = _attempt(product, run, function, ledger, begun, check)
    ledger.write(ended)
    if run.is_last and ended.status is Status.DONE:
        discard_scratch(product, run)
    report.count(ended, run, reused=False)


def _keep(
    product: PlannedProduct, run: StageRun, ledger: Ledger, standing: Standing, settled: Outcome
) -> None:
    """Finish what a killed process left to do after the work itself was done."""
    if settled != standing.former:
        ledger.write(settled)
    if run.is_last and settled.status is Status.DONE:
        point(product, run)
        discard_scratch(product, run)


def _attempt(
    product: PlannedProduct,
    run: StageRun,
    function: StageFunction,
    ledger: Ledger,
    begun: Outcome,
    check: Callable[[], None],
) -> Outcome:
    """Call the stage function once; return how it ended, or raise what is not the product's fault."""
    clock = time.monotonic()
    try:
        figures = checked_figures(function(prepare(product, run)))
        ended = replace(
            begun,
            status=Status.DONE,
            figures=figures,
            seconds=round(time.monotonic() - clock, 3),
            finished_at=now_text(),
        )
        hand_over(product, run, ledger, ended)
        return ended
    except ProductUnusable as error:
        status, reason = Status.UNUSABLE, str(error) or "the stage gave no reason"
    except Exception as error:
        _raise_if_not_its_fault(error, ledger, begun, check)
        status, reason = Status.FAILED, describe(error)
        log.warning("%s failed in %s (attempt %d): %s", product.sku, run.stage, begun.attempt, reason)
    return replace(
        begun,
        status=status,
        reason=reason,
        seconds=round(time.monotonic() - clock, 3),
        finished_at=now_text(),
    )


def _raise_if_not_its_fault(
    error: Exception, ledger: Ledger, begun: Outcome, check: Callable[[], None]
) -> None:
    """Give the attempt back and raise, when the lease is gone or the machine cannot store results."""
    interrupted = replace(begun, status=Status.INTERRUPTED, attempt=begun.attempt - 1, finished_at=now_text())
    try:
        check()
    except Exception as lost:
        ledger.write(replace(interrupted, reason=f"stopped from outside: {lost}"))
        raise
    if isinstance(error, OSError) and error.errno in _HOST_FAULTS:
        ledger.write(replace(interrupted, reason=f"the machine could not store results: {error}"))
        raise error


def describe(error: Exception) -> str:
    """Say what was raised and where, head and tail kept when it is long."""
    what = f"{type(error).__name__}: {error}".strip()
    where = "".join(traceback.format_tb(error.__traceback__)[-3:]).rstrip()
    text = f"{what}\n{where}"
    if len(text) <= _REASON_HEAD + _REASON_TAIL:
        return text
    return f"{text[:_REASON_HEAD]}\n[...]\n{text[-_REASON_TAIL:]}"
