"""From a signed distance on a grid to a clean triangle mesh.

Invariant: the mesh is closed (the grid has air all round), its faces look outwards, and it holds no crumbs
and no faces that only exist because a corner of a voxel was grazed. The next step is ``colouring``.
"""

from __future__ import annotations

import numpy as np
import trimesh
from numpy.typing import NDArray
from scipy import ndimage
from skimage.measure import marching_cubes

from workloads.reconstruction.hull import Grid

#: A piece with less than this share of the largest piece's volume is noise, not a part of the product.
SMALLEST_PIECE = 0.005

#: Taubin smoothing takes off the staircase of the grid without shrinking the shape.
SMOOTHING_STEPS = 10


class EmptySurface(ValueError):
    """The distance field has no surface: training removed the product."""


def extract_mesh(distance: NDArray[np.float32], grid: Grid) -> trimesh.Trimesh:
    """Return the zero surface in scene units; raise EmptySurface if there is none."""
    solid = _without_crumbs(distance, grid)
    if not (solid.min() < 0 < solid.max()):
        raise EmptySurface(
            f"the trained field has no surface (distances {solid.min():.3g} to {solid.max():.3g}); train "
            "with more steps, or check that the photos show one object"
        )
    vertices, faces, _, _ = marching_cubes(solid, level=0.0, gradient_direction="ascent")
    mesh = trimesh.Trimesh(grid.origin + vertices * grid.voxel, faces, process=True)
    mesh.update_faces(mesh.nondegenerate_faces())
    mesh.remove_unreferenced_vertices()
    trimesh.smoothing.filter_taubin(mesh, lamb=0.5, nu=0.53, iterations=SMOOTHING_STEPS)
    if mesh.volume < 0:
        mesh.invert()
    return mesh


def _without_crumbs(distance: NDArray[np.float32], grid: Grid) -> NDArray[np.float64]:
    """Return the distances with small separate pieces turned into air and closed bubbles filled."""
    solid = np.pad(distance.astype(np.float64), 0)
    # The border is air by construction; training must not have opened it.
    for axis in range(3):
        border = np.moveaxis(solid, axis, 0)
        border[0] = np.maximum(border[0], grid.voxel)
        border[-1] = np.maximum(border[-1], grid.voxel)
    labels, count = ndimage.label(solid < 0)
    if count > 1:
        sizes = ndimage.sum_labels(solid < 0, labels, np.arange(1, count + 1))
        crumbs = np.isin(labels, np.flatnonzero(sizes < SMALLEST_PIECE * sizes.max()) + 1)
        solid[crumbs] = grid.voxel
    air, count = ndimage.label(solid >= 0)
    if count > 1:
        bubbles = (air > 0) & (air != air[0, 0, 0])
        solid[bubbles] = -grid.voxel
    return solid
