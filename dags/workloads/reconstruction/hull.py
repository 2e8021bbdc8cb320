"""The visual hull: the largest solid whose silhouettes are the ones in the photos.

Each silhouette, as a distance in pixels to its outline, says how far a point is from leaving the product's
cone of that view; the farthest-out view decides. The result is a signed distance (negative inside) that is
exact to a fraction of a voxel near the hull, which is a good first guess for training.

Invariant: only views given are used; callers pass training views, never held-out ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from airflow_gpu_provider.catalog.product import ProductUnusable
from workloads.reconstruction.cameras import Cameras
from workloads.reconstruction.raster import project

#: The outline is found on photos enlarged by this factor.
ENLARGE = 3

#: The outlines' common solid must fill this share of each outline, on average.
SMALLEST_EXPLAINED = 0.80

#: Side of the grid that finds the product's box in the unit sphere.
SCOUT_SIDE = 48


@dataclass(frozen=True)
class Grid:
    """Nodes of a voxel grid: node (i, j, k) lies at ``origin + voxel * (i, j, k)``."""

    origin: NDArray[np.float64]
    voxel: float
    shape: tuple[int, int, int]

    @classmethod
    def over(cls, box: NDArray[np.float64], resolution: int) -> Grid:
        """Lay ``resolution`` voxels along a box's longest side, plus two voxels of air on every side."""
        low, high = box
        voxel = float((high - low).max()) / resolution
        cells = np.ceil((high - low) / voxel).astype(int) + 4
        middle = (low + high) / 2
        return cls(
            middle - cells * voxel / 2, voxel, (int(cells[0]) + 1, int(cells[1]) + 1, int(cells[2]) + 1)
        )

    def nodes(self) -> NDArray[np.float64]:
        """Return all node positions; (nodes, 3)."""
        indices = np.stack(np.meshgrid(*(np.arange(n) for n in self.shape), indexing="ij"), axis=-1)
        return np.asarray(self.origin + self.voxel * indices.reshape(-1, 3))


def outline_distances(coverage: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return per view the signed distance in pixels to the outline, negative inside; (n, height, width)."""
    distances = []
    for view in coverage:
        fine = ndimage.zoom(view, ENLARGE, order=1, grid_mode=True, mode="nearest") >= 0.5
        signed = ndimage.distance_transform_edt(~fine) - ndimage.distance_transform_edt(fine)
        # Distances run from pixel centre to pixel centre, the outline runs half a pixel beside it.
        signed -= np.sign(signed) * 0.5
        height, width = view.shape
        distances.append(signed.reshape(height, ENLARGE, width, ENLARGE).mean(axis=(1, 3)) / ENLARGE)
    return np.stack(distances)


def hull_distance(
    points: NDArray[np.float64], cameras: Cameras, views: NDArray[np.int64], distances: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the signed distance of points to the hull of ``views``, in scene units."""
    result = np.full(len(points), -np.inf)
    world_to_camera = cameras.world_to_camera
    for view in views:
        pixels, depth = project(points, cameras.intrinsics[view], world_to_camera[view])
        rows_columns = np.stack([pixels[:, 1] - 0.5, pixels[:, 0] - 0.5])
        at = ndimage.map_coordinates(distances[view], rows_columns, order=1, mode="nearest")
        focal = cameras.intrinsics[view, [0, 1], [0, 1]].mean()
        result = np.maximum(result, at * depth / focal)
    return result


def product_box(
    cameras: Cameras, views: NDArray[np.int64], distances: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the corners (2, 3) of the box that holds the product inside the unit sphere.

    Raise ProductUnusable when the silhouettes have no common solid: then photos and cameras contradict
    each other.
    """
    grid = Grid.over(np.array([[-1.0] * 3, [1.0] * 3]), SCOUT_SIDE)
    nodes = grid.nodes()
    # A scout voxel counts when any part of it may be inside, so thin parts are not lost.
    solid = nodes[hull_distance(nodes, cameras, views, distances) < 0.6 * grid.voxel]
    share = explained_share(solid, grid.voxel, cameras, views, distances)
    if share < SMALLEST_EXPLAINED:
        raise ProductUnusable(
            f"photos and cameras contradict each other: the solid on which all {len(views)} outlines "
            f"agree fills {share:.0%} of an outline, at least {SMALLEST_EXPLAINED:.0%} is needed; check that "
            "cameras.json names the right file for each view and that camera_to_world has OpenCV axes"
        )
    return np.stack([solid.min(axis=0) - grid.voxel / 2, solid.max(axis=0) + grid.voxel / 2])


def explained_share(
    solid: NDArray[np.float64],
    voxel: float,
    cameras: Cameras,
    views: NDArray[np.int64],
    distances: NDArray[np.float64],
) -> float:
    """Return the mean share of each view's silhouette that a solid of voxel centres projects onto."""
    height, width = cameras.size
    shares = []
    for view in views:
        pixels, depth = project(solid, cameras.intrinsics[view], cameras.world_to_camera[view])
        columns, rows = pixels.astype(int).T
        inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
        hit = np.zeros((height, width), dtype=bool)
        hit[rows[inside], columns[inside]] = True
        # Voxel centres lie this far apart on the photo; between them is solid too.
        apart = (
            voxel * cameras.intrinsics[view, 0, 0] / max(float(np.median(depth)), 1e-6) if len(depth) else 0
        )
        hit = ndimage.binary_dilation(hit, iterations=int(apart / 2) + 1)
        silhouette = distances[view] < 0
        shares.append((hit & silhouette).sum() / max(int(silhouette.sum()), 1))
    return float(np.mean(shares))
