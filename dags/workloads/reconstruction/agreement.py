"""Find the views whose outlines agree on one solid, and the box that holds it.

One outline found wrongly (a grey side before a grey backdrop) cuts a piece off the hull that no later step
can bring back, so a view whose removal makes the others fit much better is left out. When too many would have
to go, photos and cameras contradict each other and the product is refused.

Invariant: held-out views are never looked at. The next step is ``train``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from airflow_gpu_provider.catalog.product import ProductUnusable
from workloads.reconstruction.cameras import Cameras
from workloads.reconstruction.hull import Grid, cone_distance
from workloads.reconstruction.raster import project

#: Side of the grid that finds the product in the unit sphere.
SCOUT_SIDE = 48

#: The common solid must fill this share of each outline, on average.
SMALLEST_EXPLAINED = 0.80

#: A view is left out when the others' outlines are filled better by this share without it ...
GAIN = 0.03

#: ... and at most this share of the views may be.
MOST_LEFT_OUT = 0.10


@dataclass(frozen=True)
class Agreement:
    """Which views agree, and where the product is."""

    left_out: tuple[int, ...]
    #: corners of the box that holds the product; (2, 3)
    box: NDArray[np.float64]


class _Scout:
    """A coarse grid over the unit sphere with every view's opinion of every node."""

    def __init__(self, cameras: Cameras, views: NDArray[np.int64], distances: NDArray[np.float64]) -> None:
        self.cameras, self.distances = cameras, distances
        self.grid = Grid.over(np.array([[-1.0] * 3, [1.0] * 3]), SCOUT_SIDE)
        self.nodes = self.grid.nodes()
        self.cones = {
            int(view): cone_distance(self.nodes, cameras, int(view), distances[view]) for view in views
        }

    def solid(self, views: list[int]) -> NDArray[np.float64]:
        """Return the nodes that lie in the cones of all views."""
        outside = np.maximum.reduce([self.cones[view] for view in views])
        # A node counts when any part of its voxel may be inside, so thin parts are not lost.
        return np.asarray(self.nodes[outside < 0.6 * self.grid.voxel])

    def explained(self, views: list[int]) -> float:
        """Return the mean share of the views' outlines that their common solid fills."""
        solid = self.solid(views)
        return float(np.mean([self._filled(solid, view) for view in views]))

    def _filled(self, solid: NDArray[np.float64], view: int) -> float:
        height, width = self.cameras.size
        pinhole = self.cameras.intrinsics[view]
        pixels, depth = project(solid, pinhole, self.cameras.world_to_camera[view])
        columns, rows = pixels.astype(int).T
        inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
        hit = np.zeros((height, width), dtype=bool)
        hit[rows[inside], columns[inside]] = True
        # Nodes lie this far apart on the photo; between them is solid too.
        apart = self.grid.voxel * pinhole[0, 0] / max(float(np.median(depth)), 1e-6) if len(depth) else 0.0
        hit = ndimage.binary_dilation(hit, iterations=int(apart / 2) + 1)
        silhouette = self.distances[view] < 0
        return float((hit & silhouette).sum() / max(int(silhouette.sum()), 1))


def agree(cameras: Cameras, views: NDArray[np.int64], distances: NDArray[np.float64]) -> Agreement:
    """Leave out views that contradict the others; raise ProductUnusable if that is not enough."""
    scout = _Scout(cameras, views, distances)
    kept = [int(view) for view in views]
    left_out: list[int] = []
    share = scout.explained(kept)
    while share < 1 - GAIN and len(left_out) + 1 <= MOST_LEFT_OUT * len(views):
        trials = {view: scout.explained([other for other in kept if other != view]) for view in kept}
        worst = max(trials, key=lambda view: trials[view])
        if trials[worst] < share + GAIN:
            break
        share = trials[worst]
        kept.remove(worst)
        left_out.append(worst)
    if share < SMALLEST_EXPLAINED:
        raise ProductUnusable(
            f"photos and cameras contradict each other: the solid on which {len(kept)} outlines agree fills "
            f"{share:.0%} of an outline, at least {SMALLEST_EXPLAINED:.0%} is needed; check that "
            "cameras.json names the right file for each view, that camera_to_world has OpenCV axes, and that "
            "the backdrop differs from the product on all sides"
        )
    solid, half = scout.solid(kept), scout.grid.voxel / 2
    return Agreement(tuple(sorted(left_out)), np.stack([solid.min(axis=0) - half, solid.max(axis=0) + half]))
