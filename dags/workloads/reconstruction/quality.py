"""Score the exported mesh against photos that training never saw.

The mesh itself is drawn, not the field it came from, so the figures speak of the file a shop would show.
IoU compares silhouettes with those segmented from the held-out photos. PSNR is taken over the pixels of both
silhouettes together, with the photo's backdrop behind the mesh: a large empty backdrop cannot flatter it.

Invariant: nothing here depends on training data. Used by ``postprocess``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import trimesh
from numpy.typing import NDArray

from workloads.reconstruction.cameras import Cameras
from workloads.reconstruction.prepared import Prepared
from workloads.reconstruction.raster import rasterise

#: Samples per pixel in each direction when the mesh is drawn for scoring.
SAMPLES = 3


@dataclass(frozen=True)
class Quality:
    """Figures of one product: means over its held-out views, and the worst of them."""

    iou: float
    psnr: float
    worst_iou: float
    views: int


def draw_mesh(
    mesh: trimesh.Trimesh,
    colours: NDArray[np.float64],
    cameras: Cameras,
    view: int,
    *,
    samples: int = SAMPLES,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return colour times coverage (height, width, 3) and coverage (height, width) of one view."""
    fine = cameras.resized(samples)
    fragments = rasterise(
        np.asarray(mesh.vertices),
        np.asarray(mesh.faces),
        fine.intrinsics[view],
        fine.world_to_camera[view],
        fine.size,
    )
    corner_colours = colours[np.asarray(mesh.faces)[fragments.face]]
    image = (corner_colours * fragments.weights[..., None]).sum(axis=2) * fragments.covered[..., None]
    height, width = cameras.size
    blocks = (height, samples, width, samples)
    return image.reshape(*blocks, 3).mean(axis=(1, 3)), fragments.covered.reshape(blocks).mean(axis=(1, 3))


def silhouette_iou(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> float:
    """Return intersection over union; two empty silhouettes do not agree on anything, so 0."""
    union = int((first | second).sum())
    return float((first & second).sum() / union) if union else 0.0


def psnr(difference: NDArray[np.float64]) -> float:
    """Return the peak signal-to-noise ratio in dB of differences in 0..1, at most 99 (equal images)."""
    error = float((difference**2).mean()) if difference.size else 1.0
    return float(min(99.0, -10 * np.log10(max(error, 1e-12))))


def score(mesh: trimesh.Trimesh, colours: NDArray[np.float64], prepared: Prepared) -> Quality:
    """Compare the mesh with every held-out view."""
    ious, ratios = [], []
    for view in prepared.held_out_views:
        image, coverage = draw_mesh(mesh, colours, prepared.cameras, int(view))
        observed = prepared.coverage[view] >= 0.5
        drawn = coverage >= 0.5
        ious.append(silhouette_iou(drawn, observed))
        composed = image + (1 - coverage[..., None]) * prepared.paper[view]
        ratios.append(psnr((composed - prepared.photos[view] / 255)[drawn | observed]))
    return Quality(
        iou=float(np.mean(ious)), psnr=float(np.mean(ratios)), worst_iou=float(np.min(ious)), views=len(ious)
    )
