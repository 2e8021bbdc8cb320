"""Find the product in a photo: what does not look like the backdrop.

The backdrop is learned from each photo alone: a smooth surface per colour channel, fitted to the border and
then to everything that agrees with it. What differs by more than the sensor's noise is the product. At the
outline, each pixel's coverage is solved from the colours on both sides of it, so the silhouette is known to a
fraction of a pixel. No mask is read from anywhere.

Invariant: the result depends on one photo only, so a held-out photo stays unseen by training. The next step
is ``hull``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from airflow_gpu_provider.catalog.product import ProductUnusable

#: A pixel whose smoothed difference exceeds this many noise deviations starts a region ...
SEED_DEVIATIONS = 7.0

#: ... and its neighbours above this many belong to it.
GROW_DEVIATIONS = 3.5

#: A region smaller than this share of the largest one is dirt, not a part of the product.
SMALLEST_PART = 0.01

#: Holes of up to this many pixels are noise; larger ones are real (a handle, the gap between slats).
LARGEST_FALSE_HOLE = 4

#: A product must fill this share of the photo, or its outline has too few pixels to say anything.
SMALLEST_OBJECT = 0.005

#: The backdrop's noise is never taken as lower than this (in 0..1), or a synthetic flat colour divides by 0.
NOISE_FLOOR = 1.0 / 255


@dataclass(frozen=True)
class Segmented:
    """One photo, split."""

    #: share of each pixel that the product covers, 0..1; (height, width)
    coverage: NDArray[np.float64]
    #: the backdrop as it would look without the product; (height, width, 3)
    paper: NDArray[np.float64]

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Where the product covers at least half of the pixel."""
        return self.coverage >= 0.5


def segment(photo: NDArray[np.uint8], name: str) -> Segmented:
    """Split a photo; raise ProductUnusable when there is no product in it, or it is cut off."""
    image = photo.astype(np.float64) / 255
    paper, noise = fit_paper(image)
    mask = _object_mask(image, paper, noise)
    share = float(mask.mean())
    if share < SMALLEST_OBJECT:
        raise ProductUnusable(
            f"no product found in {name}: {share:.1%} of the photo differs from the backdrop, at least "
            f"{SMALLEST_OBJECT:.1%} is needed; use a backdrop of another colour or move the camera nearer"
        )
    touching = _touching_share(mask)
    if touching > 0.15:
        raise ProductUnusable(
            f"the product is cut off in {name}: it touches {touching:.0%} of the photo's border, at most 15% "
            "is allowed; leave some backdrop on all sides"
        )
    return Segmented(coverage=_matte(image, paper, mask), paper=paper)


def fit_paper(image: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the backdrop (height, width, 3) and its noise per channel, from the photo's border inwards."""
    height, width, _ = image.shape
    rows, columns = np.mgrid[0:height, 0:width]
    y, x = rows.ravel() / height - 0.5, columns.ravel() / width - 0.5
    terms = [np.ones_like(x), x, y, x * x, x * y, y * y, x**3, x * x * y, x * y * y, y**3]
    basis = np.stack(terms, axis=1)
    pixels = image.reshape(-1, 3)
    frame = max(4, height // 16)
    border = (rows < frame) | (rows >= height - frame) | (columns < frame) | (columns >= width - frame)
    chosen = border.ravel()
    # Start from the median, which a product that reaches into the border cannot move; then bend it stepwise.
    paper = np.broadcast_to(np.median(pixels[chosen], axis=0), pixels.shape)
    noise = np.full(3, NOISE_FLOOR)
    for used in (0, 3, 6, 6, 10, 10):
        if used:
            solution = np.linalg.lstsq(basis[chosen, :used], pixels[chosen], rcond=None)[0]
            paper = basis[:, :used] @ solution
        residual = np.abs(pixels - paper)
        noise = np.maximum(1.4826 * np.median(residual[chosen], axis=0), NOISE_FLOOR)
        near = ((residual / noise) ** 2).sum(axis=1) < 16
        # Of the inside, only what lies away from anything suspicious is backdrop.
        suspicious = ndimage.binary_dilation(
            ndimage.uniform_filter(1.0 - near.reshape(height, width), 3) > 0.5, iterations=2
        )
        chosen = near & ~suspicious.ravel()
        if chosen.sum() < 0.02 * len(pixels):
            break
    return paper.reshape(image.shape), noise


def _object_mask(
    image: NDArray[np.float64], paper: NDArray[np.float64], noise: NDArray[np.float64]
) -> NDArray[np.bool_]:
    difference = (image - paper) / noise
    # A little smoothing averages the noise away; more would round off thin legs.
    smooth = ndimage.gaussian_filter(difference, (0.6, 0.6, 0))
    strength = np.sqrt((smooth**2).mean(axis=2))
    labels, _ = ndimage.label(strength > GROW_DEVIATIONS, structure=np.ones((3, 3)))
    seeded = np.unique(labels[strength > SEED_DEVIATIONS])
    mask = np.isin(labels, seeded[seeded > 0])
    labels, count = ndimage.label(mask, structure=np.ones((3, 3)))
    if not count:
        return mask
    areas = ndimage.sum_labels(mask, labels, np.arange(1, count + 1))
    mask = np.isin(labels, np.flatnonzero(areas >= SMALLEST_PART * areas.max()) + 1)
    holes, count = ndimage.label(~mask)
    areas = ndimage.sum_labels(~mask, holes, np.arange(1, count + 1))
    return np.asarray(mask | np.isin(holes, np.flatnonzero(areas <= LARGEST_FALSE_HOLE) + 1))


def _matte(
    image: NDArray[np.float64], paper: NDArray[np.float64], mask: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return coverage: 1 inside, 0 outside, and solved from the colours in a thin band along the outline.

    In the band a photo's colour is a mix of the product's colour (taken from the nearest sure pixel) and the
    backdrop's; the mixing share is the coverage.
    """
    sure = ndimage.binary_erosion(mask, iterations=2, border_value=1)
    # Parts thinner than 5 pixels have no sure pixel: their middle line, where they differ most, stands in.
    difference = np.linalg.norm(image - paper, axis=2)
    ridge = mask & (difference >= ndimage.maximum_filter(np.where(mask, difference, 0), 3))
    sure = sure | ridge
    band = ndimage.binary_dilation(mask, iterations=1) & ~sure
    nearest = ndimage.distance_transform_edt(~sure, return_distances=False, return_indices=True)
    product = image[nearest[0], nearest[1]]
    direction = product - paper
    length = np.maximum((direction**2).sum(axis=2), 1e-6)
    share = np.clip(((image - paper) * direction).sum(axis=2) / length, 0, 1)
    return np.asarray(np.where(band, share, sure.astype(np.float64)))


def _touching_share(mask: NDArray[np.bool_]) -> float:
    border = np.concatenate([mask[0], mask[-1], mask[1:-1, 0], mask[1:-1, -1]])
    return float(border.mean())
