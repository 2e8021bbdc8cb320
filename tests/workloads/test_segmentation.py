from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from workloads.reconstruction.cameras import load_cameras
from workloads.reconstruction.photos import load_photos
from workloads.reconstruction.segmentation import fit_paper, segment

from airflow_gpu_provider.catalog.product import Product, ProductUnusable
from scripts.catalog_photos import true_silhouettes
from scripts.catalog_shapes import SAMPLES

SAMPLE = Path(__file__).resolve().parents[2] / "dags" / "sample_catalog"


def noisy_paper(side: int = 96, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:side, 0:side] / side
    paper = np.array([0.7, 0.72, 0.76]) * (1 - 0.15 * rows * columns)[..., None]
    return paper * 255 + random.normal(0, 2.0, (side, side, 3))


def disc(side: int, radius: float) -> np.ndarray:
    """Return the coverage of a disc, exact to a sixteenth of a pixel."""
    fine = np.mgrid[0 : side * 8, 0 : side * 8] / 8 + 1 / 16
    inside = np.hypot(fine[0] - side / 2 - 0.3, fine[1] - side / 2 + 0.2) <= radius
    return inside.reshape(side, 8, side, 8).mean(axis=(1, 3))


def test_a_disc_on_noisy_paper_is_found_to_a_fraction_of_a_pixel() -> None:
    coverage = disc(96, 25)[..., None]
    photo = (
        (noisy_paper() * (1 - coverage) + np.array([180, 60, 50]) * coverage).clip(0, 255).astype(np.uint8)
    )
    found = segment(photo, "disc.png").coverage
    assert found.sum() == pytest.approx(coverage.sum(), rel=0.01)
    assert np.abs(found - coverage[..., 0]).sum() < 0.02 * coverage.sum()


def test_a_hole_of_a_handle_stays_open() -> None:
    ring = (disc(96, 25) - disc(96, 14))[..., None]
    photo = (noisy_paper() * (1 - ring) + np.array([40, 80, 50]) * ring).clip(0, 255).astype(np.uint8)
    mask = segment(photo, "ring.png").mask
    assert not mask[48, 48]
    assert mask[48, 48 + 20]


def test_the_backdrop_is_rebuilt_behind_the_product() -> None:
    paper = noisy_paper()
    photo = paper.copy()
    photo[30:70, 30:70] = (30, 30, 120)
    fitted, noise = fit_paper(photo / 255)
    assert np.abs(fitted * 255 - paper).mean() < 2.5
    assert noise * 255 == pytest.approx(2.0, rel=0.35)


def test_an_empty_photo_is_refused_with_its_name_and_what_to_change() -> None:
    with pytest.raises(ProductUnusable, match=r"no product found in empty\.png.*at least 0\.5%.*backdrop"):
        segment(noisy_paper().clip(0, 255).astype(np.uint8), "empty.png")


def test_a_product_cut_off_by_the_frame_is_refused() -> None:
    photo = noisy_paper()
    photo[40:, 8:88] = (30, 60, 140)
    with pytest.raises(ProductUnusable, match=r"cut off in half\.png.*at most 15%"):
        segment(photo.clip(0, 255).astype(np.uint8), "half.png")


@pytest.mark.parametrize("sku", ["CH-002", "KT-003", "FW-001"])
def test_silhouettes_of_the_sample_agree_with_the_true_ones(sku: str, tmp_path: Path) -> None:
    """Scores use segmented silhouettes; this is what makes those scores mean something."""
    sample = next(sample for sample in SAMPLES if sample.sku == sku)
    product = Product(sku, {"views": f"views/{sku}"}, SAMPLE, tmp_path, tmp_path)
    photos, _ = load_photos(product)
    cameras = load_cameras(SAMPLE / "views" / sku / "cameras.json")
    views = [1, 13, 20]
    truth = (
        true_silhouettes(sample.build(), cameras.intrinsics[0], cameras.poses[views], cameras.size[0]) >= 0.5
    )
    found = np.stack([segment(photos[view], "view").mask for view in views])
    iou = (truth & found).sum(axis=(1, 2)) / (truth | found).sum(axis=(1, 2))
    assert iou.min() > 0.95
    assert found.sum() == pytest.approx(truth.sum(), rel=0.03)
