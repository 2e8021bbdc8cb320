"""Prepare the folders of a product for a stage, and take over what the stage left in them.

A first stage begins with empty scratch and every stage with an empty `output_dir`, so that nothing half
written by a killed attempt is taken for a result. Next step: `publish`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from airflow_gpu_provider.catalog.atomic import write_json
from airflow_gpu_provider.catalog.layout import RECORD_NAME
from airflow_gpu_provider.catalog.ledger import Ledger, Outcome
from airflow_gpu_provider.catalog.plan import PlannedProduct
from airflow_gpu_provider.catalog.product import Product
from airflow_gpu_provider.catalog.publish import point_latest, publish
from airflow_gpu_provider.catalog.stage_run import StageRun


def prepare(product: PlannedProduct, run: StageRun) -> Product:
    """Prepare the folders and describe the product to its stage function."""
    work = run.plan.folders.work(product.sku, product.version)
    staged = run.plan.folders.staged(product.sku, product.version)
    if run.before is None:
        # What a killed attempt left half written must not be taken for a result.
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    elif not work.is_dir():
        raise RuntimeError(
            f"the files that {run.before} left for {run.stage} are gone ({work}): they are removed once a "
            "product is published; start a new run with `redo`"
        )
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    return Product(
        sku=product.sku,
        row=product.row,
        input_dir=Path(run.plan.catalog).parent,
        work_dir=work,
        output_dir=staged,
        device=run.torch_device,
        device_name=run.device_model,
        params=run.params,
    )


def hand_over(product: PlannedProduct, run: StageRun, ledger: Ledger, ended: Outcome) -> None:
    """Publish what the last stage made; refuse final files of an earlier one rather than drop them."""
    folders = run.plan.folders
    staged = folders.staged(product.sku, product.version)
    if not run.is_last:
        if any(staged.iterdir()):
            raise RuntimeError(
                f"stage {run.stage!r} wrote to output_dir, but only the last stage ({run.plan.stages[-1]}) "
                "publishes; write to work_dir"
            )
        return
    earlier = [ledger.read(stage, product.sku) for stage in run.plan.stages[:-1]]
    stages = [outcome.as_json() for outcome in (*earlier, ended) if outcome is not None]
    write_json(staged / RECORD_NAME, {**ended.as_json(), "stages": stages})
    publish(run.plan.results, product.sku, product.version, staged=staged)
    point(product, run)


def point(product: PlannedProduct, run: StageRun) -> None:
    """Move the pointer to this version, unless a newer one has it."""
    point_latest(
        run.plan.results,
        product.sku,
        product.version,
        updated_at=product.updated_at,
        run_id=run.plan.run_id,
    )


def discard_scratch(product: PlannedProduct, run: StageRun) -> None:
    """Remove what only this run needed; a million products' scratch would fill any disk."""
    folders = run.plan.folders
    for folder in (folders.work(product.sku, product.version), folders.staged(product.sku, product.version)):
        # The parent is the product's; what an older version left there goes too.
        shutil.rmtree(folder.parent, ignore_errors=True)
