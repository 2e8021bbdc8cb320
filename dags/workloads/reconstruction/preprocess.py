"""Stage 1 (CPU): photos and cameras in, silhouettes and normalised cameras out.

Everything that makes a product unusable is found here, before a GPU is leased for it. Entry point
``workloads.reconstruction.preprocess:preprocess``; the next stage is ``train``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from airflow_gpu_provider.catalog.product import Product
from workloads.reconstruction.agreement import agree
from workloads.reconstruction.cameras import look_at_sphere
from workloads.reconstruction.figures import write_figures
from workloads.reconstruction.hull import outline_distances
from workloads.reconstruction.photos import load_photos
from workloads.reconstruction.prepared import Prepared
from workloads.reconstruction.segmentation import segment

#: One view in this many is kept from training, to score what training could not memorise.
HOLD_OUT_EVERY = 6


def preprocess(product: Product) -> Mapping[str, object]:
    """Segment the photos, check and normalise the cameras, choose held-out views; write ``prepared.npz``."""
    started = time.monotonic()
    photos, cameras = load_photos(product)
    centre, radius = look_at_sphere(cameras)
    cameras = cameras.normalised(centre, radius)
    segmented = [segment(photo, name) for photo, name in zip(photos, cameras.files, strict=True)]
    coverage = np.stack([one.coverage for one in segmented])
    held_out = choose_held_out(len(cameras))
    agreement = agree(cameras, np.flatnonzero(~held_out), outline_distances(coverage))
    Prepared(
        photos=photos,
        coverage=coverage,
        paper=np.stack([one.paper for one in segmented]),
        cameras=cameras,
        held_out=held_out,
        left_out=np.isin(np.arange(len(cameras)), agreement.left_out),
        box=agreement.box,
        centre=centre,
        radius=radius,
    ).save(product.work_dir)
    figures: dict[str, object] = {
        "views": len(cameras),
        "held_out_views": int(held_out.sum()),
        "left_out_views": len(agreement.left_out),
        "object_share": round(float(coverage.mean()), 4),
        "seconds": round(time.monotonic() - started, 3),
    }
    write_figures(product.work_dir, "preprocess", figures)
    return figures


def choose_held_out(views: int) -> NDArray[np.bool_]:
    """Return True for every sixth view in the order of cameras.json, so that each ring gives some."""
    held_out = np.zeros(views, dtype=bool)
    held_out[HOLD_OUT_EVERY // 3 :: HOLD_OUT_EVERY] = True
    return held_out
