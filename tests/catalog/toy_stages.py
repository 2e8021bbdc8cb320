"""Stage functions for the tests: they write small files, or fail as the row's column `does` says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from airflow_gpu_provider.catalog.product import Product, ProductUnusable


def calls(product: Product, stage: str) -> Path:
    """Note the call in a file beside the manifest and return the file."""
    path = product.input_dir / f"calls-{stage}.txt"
    with path.open("a") as notes:
        notes.write(f"{product.sku}\n")
    return path


def prepare(product: Product) -> Mapping[str, object]:
    calls(product, "prepare")
    if product.row["does"] == "unusable":
        raise ProductUnusable("only 3 views; at least 16 are needed")
    if product.row["does"] == "leave half":
        (product.work_dir / "half.txt").touch(exist_ok=False)
        if not (product.input_dir / "second.txt").exists():
            (product.input_dir / "second.txt").touch()
            raise RuntimeError("stopped half-way")
    (product.work_dir / "prepared.txt").write_text(product.row["title"])
    return {"views": 16}


def fit(product: Product) -> Mapping[str, object]:
    path = calls(product, "fit")
    attempts = path.read_text().split().count(product.sku)
    does = product.row["does"]
    if does == "raise" or (does == "raise once" and attempts == 1):
        raise ValueError(f"no geometry in {product.sku}")
    if does == "kill" or (does == "kill once" and attempts == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "fill the disk":
        raise OSError(28, "No space left on device")
    if does == "write final files":
        (product.output_dir / "early.txt").write_text("too early")
    text = (product.work_dir / "prepared.txt").read_text()
    (product.work_dir / "fitted.txt").write_text(f"{text} at {product.params.get('steps')}")
    return {"loss": float("inf") if does == "overflow" else 0.25}


def show(product: Product) -> Mapping[str, object]:
    path = calls(product, "show")
    (product.output_dir / "model.txt").write_text((product.work_dir / "fitted.txt").read_text())
    if product.row["does"] == "kill while writing" and path.read_text().split().count(product.sku) == 1:
        (product.output_dir / "half.txt").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"below_threshold": product.row["does"] == "poor", "iou": 0.95}


def slow(product: Product) -> Mapping[str, object]:
    calls(product, "slow")
    time.sleep(1.0)
    return {}


def returns_text(product: Product) -> object:
    return "fine"


def visible_gpus(product: Product) -> Mapping[str, object]:
    (product.input_dir / "cuda.txt").write_text(repr(os.environ.get("CUDA_VISIBLE_DEVICES")))
    return {}
