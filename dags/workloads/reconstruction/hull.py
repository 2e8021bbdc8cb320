"""The visual hull: the largest solid whose silhouettes are the ones in the photos.

Each silhouette, as a distance in pixels to its outline, says how far a point is from leaving the product's
cone of that view; the farthest-out view decides. The result is a signed distance (negative inside) that is
exact to a fraction of a voxel near the hull, which is a good first guess for training.

Invariant: only views given are used; callers pass training views, never held-out ones. Next: ``agreement``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from workloads.reconstruction.cameras import Cameras
from workloads.reconstruction.raster import project

#: The outline is found on photos enlarged by this factor.
ENLARGE = 3


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
    for view in views:
        result = np.maximum(result, cone_distance(points, cameras, int(view), distances[view]))
    return result


def cone_distance(
    points: NDArray[np.float64], cameras: Cameras, view: int, distances: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return how far points are from leaving one view's cone, in scene units, negative inside."""
    pixels, depth = project(points, cameras.intrinsics[view], cameras.world_to_camera[view])
    rows_columns = np.stack([pixels[:, 1] - 0.5, pixels[:, 0] - 0.5])
    at = ndimage.map_coordinates(distances, rows_columns, order=1, mode="nearest")
    focal = cameras.intrinsics[view, [0, 1], [0, 1]].mean()
    return np.asarray(at * depth / focal)
