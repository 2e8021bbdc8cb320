"""Find the vertex colours that reproduce the training photos best.

Drawing a mesh is linear in its vertex colours: each pixel is a weighted mean of some vertices. So the best
colours are a sparse least-squares problem, solved exactly instead of by more training. Vertices that no photo
shows take the colours of their neighbours.

Invariant: only the views given are used; callers pass training views. The next step is ``quality``.
"""

from __future__ import annotations

import numpy as np
import trimesh
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import cg

from workloads.reconstruction.cameras import Cameras
from workloads.reconstruction.raster import rasterise

#: Each photo pixel is modelled as the mean of this many samples in each direction.
SAMPLES = 2

#: Pull of a vertex towards its neighbours, in pixels' worth: enough to fill unseen places and damp noise.
SMOOTHNESS = 0.05

GREY_PULL = 1e-6

#: Only pixels that the product covers this far tell its colour.
SURE_COVERAGE = 0.97


def vertex_colours(
    mesh: trimesh.Trimesh,
    photos: NDArray[np.uint8],
    coverage: NDArray[np.float64],
    cameras: Cameras,
    views: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Return colours 0..1 for each vertex; (vertices, 3)."""
    count = len(mesh.vertices)
    rows, seen_colours = [], []
    for view in views:
        matrix, seen = _pixel_weights(mesh, cameras, int(view))
        use = seen & (coverage[view].ravel() >= SURE_COVERAGE)
        rows.append(matrix[use])
        seen_colours.append(photos[view].reshape(-1, 3)[use] / 255)
    weights, observed = sparse.vstack(rows).tocsr(), np.concatenate(seen_colours)
    # The tiny diagonal keeps pieces that no photo shows solvable: they stay grey.
    system = weights.T @ weights + SMOOTHNESS * _laplacian(mesh) + GREY_PULL * sparse.identity(count)
    target = weights.T @ observed + GREY_PULL * 0.5
    colours = [_solve(system.tocsr(), target[:, channel]) for channel in range(3)]
    return np.asarray(np.clip(np.stack(colours, axis=1), 0, 1))


def _solve(system: sparse.csr_matrix, target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve by conjugate gradients: the matrix is positive definite and close to diagonal."""
    solution, _ = cg(
        system,
        target,
        x0=np.full(len(target), 0.5),
        rtol=1e-5,
        maxiter=1000,
        M=sparse.diags(1 / system.diagonal()),
    )
    return np.asarray(solution)


def _pixel_weights(
    mesh: trimesh.Trimesh, cameras: Cameras, view: int
) -> tuple[sparse.csr_matrix, NDArray[np.bool_]]:
    """Return per photo pixel the weights of the vertices it shows, and whether it shows only the mesh."""
    fine = cameras.resized(SAMPLES)
    fragments = rasterise(
        np.asarray(mesh.vertices),
        np.asarray(mesh.faces),
        fine.intrinsics[view],
        fine.world_to_camera[view],
        fine.size,
    )
    height, width = cameras.size
    rows, columns = np.nonzero(fragments.covered)
    pixel = (rows // SAMPLES) * width + columns // SAMPLES
    vertices = np.asarray(mesh.faces)[fragments.face[rows, columns]]
    weights = fragments.weights[rows, columns] / SAMPLES**2
    matrix = sparse.csr_matrix(
        (weights.ravel(), (np.repeat(pixel, 3), vertices.ravel())), shape=(height * width, len(mesh.vertices))
    )
    samples = fragments.covered.reshape(height, SAMPLES, width, SAMPLES).sum(axis=(1, 3)).ravel()
    return matrix, samples == SAMPLES**2


def _laplacian(mesh: trimesh.Trimesh) -> sparse.csc_matrix:
    edges = np.asarray(mesh.edges_unique)
    count = len(mesh.vertices)
    ones = np.ones(len(edges))
    adjacency = sparse.coo_matrix((ones, (edges[:, 0], edges[:, 1])), shape=(count, count))
    adjacency = (adjacency + adjacency.T).tocsc()
    degree = np.asarray(adjacency.sum(axis=1)).ravel()
    return (sparse.diags(degree) - adjacency).tocsc()
