"""Where a product stands before a stage: to be skipped, settled already, or to be done.

Only reads, so that it can be asked before a device is leased. A settled outcome belongs to the same
fingerprint; anything else is done again. Next step: `runner` does what is pending.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from airflow_gpu_provider.catalog.ledger import Ledger, Outcome, Status, now_text, read_outcome
from airflow_gpu_provider.catalog.plan import PlannedProduct
from airflow_gpu_provider.catalog.stage import fingerprint
from airflow_gpu_provider.catalog.stage_run import StageRun

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of a product before its stage."""

    is_skipped: bool = False  #: the stage before is not done
    fingerprint: str = ""
    former: Outcome | None = None  #: of the same fingerprint
    settled: Outcome | None = None  #: there is nothing left to do, and this is how it ended

    @property
    def is_pending(self) -> bool:
        """Whether the stage function is to be called."""
        return not self.is_skipped and self.settled is None


def look_up(product: PlannedProduct, run: StageRun) -> Standing:
    """Read where the product stands."""
    ledger = Ledger(run.plan.folders)
    earlier = ledger.read(run.before, product.sku) if run.before else None
    if run.before and not is_done(earlier, product):
        return Standing(is_skipped=True)
    mark = fingerprint(
        entrypoint=run.entrypoint,
        params=run.params,
        version=product.version,
        row=product.row,
        before=earlier.fingerprint if earlier else "",
    )
    former = ledger.read(run.stage, product.sku)
    if former is not None and former.fingerprint != mark:
        log.info("%s: %s is done again, its parameters or its row changed", product.sku, run.stage)
        former = None
    return Standing(fingerprint=mark, former=former, settled=_settled(former, product, run, mark))


def is_done(outcome: Outcome | None, product: PlannedProduct) -> bool:
    """Tell whether a stage of this very version is done."""
    return outcome is not None and outcome.status is Status.DONE and outcome.version == product.version


def _settled(former: Outcome | None, product: PlannedProduct, run: StageRun, mark: str) -> Outcome | None:
    """Return the outcome when there is nothing left to do, else None."""
    if former is None:
        return None
    if former.status is Status.UNUSABLE:
        return former
    published = _published(product, run, mark) if run.is_last else None
    if published is not None:
        # Also when the process died between publishing and writing the outcome.
        return published
    if former.status is Status.DONE:
        return former if _is_still_there(product, run) else None
    if former.attempt < run.max_attempts:
        return None
    if former.status is Status.RUNNING:
        reason = (
            f"its process was killed {former.attempt} times in {run.stage} (out of memory?); "
            "correct the product or give the stage more memory, then start a new run"
        )
        return replace(former, status=Status.FAILED, reason=reason, finished_at=now_text())
    return former if former.status is Status.FAILED else None


def _published(product: PlannedProduct, run: StageRun, mark: str) -> Outcome | None:
    record = read_outcome(run.plan.results.record(product.sku, product.version))
    # What another run published is the plan's affair: here it would defeat a wanted redo.
    if record is None or record.fingerprint != mark or record.run_id != run.plan.run_id:
        return None
    return record


def _is_still_there(product: PlannedProduct, run: StageRun) -> bool:
    """Tell whether what a done stage made can still be used by the next one or by readers."""
    if run.is_last:
        return False
    if run.plan.folders.work(product.sku, product.version).is_dir():
        return True
    return is_done(Ledger(run.plan.folders).read(run.plan.stages[-1], product.sku), product)
