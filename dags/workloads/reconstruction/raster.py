"""Draw triangle meshes with a z-buffer in plain numpy.

One rasteriser serves everyone: the script that photographs the sample catalogue, the vertex colouring, the
thumbnail and the quality figures. Pixel (row, column) has its centre at (row + 0.5, column + 0.5); a pixel
belongs to a triangle when that centre lies inside its projection, so a silhouette has no half-pixel bias.

Invariant: faces are two-sided and the nearest one wins. What the pixels mean is decided by the caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Candidate (face, pixel) pairs tested at once: some 100 MB of temporaries at most.
CANDIDATES_PER_BLOCK = 1_000_000

#: Vertices nearer than this in front of the camera (in scene units) cannot be projected.
NEAR_PLANE = 1e-4


@dataclass(frozen=True)
class Fragments:
    """What the camera sees: per pixel the nearest face and where on it."""

    #: index of the face, -1 where the pixel sees nothing; (height, width)
    face: NDArray[np.int64]
    #: weights of the face's three corners, perspective-correct; (height, width, 3)
    weights: NDArray[np.float64]
    #: distance along the optical axis, infinite where nothing is seen; (height, width)
    depth: NDArray[np.float64]

    @property
    def covered(self) -> NDArray[np.bool_]:
        """Where the pixel sees the mesh."""
        return self.face >= 0


def inverse(matrices: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the inverse of one 4x4 matrix or of a stack of them."""
    return np.asarray(np.linalg.inv(matrices), dtype=np.float64)


def project(
    points: NDArray[np.float64], intrinsics: NDArray[np.float64], world_to_camera: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return pixel positions (n, 2) and depths (n,) of world points."""
    camera = points @ world_to_camera[:3, :3].T + world_to_camera[:3, 3]
    depth = camera[:, 2]
    safe = np.where(np.abs(depth) < NEAR_PLANE, NEAR_PLANE, depth)
    pixels = camera[:, :2] / safe[:, None] * intrinsics[[0, 1], [0, 1]] + intrinsics[[0, 1], [2, 2]]
    return pixels, depth


def rasterise(
    vertices: NDArray[np.float64],
    faces: NDArray[np.int64],
    intrinsics: NDArray[np.float64],
    world_to_camera: NDArray[np.float64],
    size: tuple[int, int],
) -> Fragments:
    """Find the nearest face for each pixel of an image of ``size`` (height, width)."""
    height, width = size
    pixels, depth = project(vertices, intrinsics, world_to_camera)
    in_front = np.flatnonzero((depth[faces] > NEAR_PLANE).all(axis=1))
    best_depth = np.full(height * width, np.inf)
    best_face = np.full(height * width, -1, dtype=np.int64)
    best_weights = np.zeros((height * width, 3))
    corners, inverse_depth = pixels[faces], 1.0 / np.maximum(depth, NEAR_PLANE)[faces]
    for face, pixel in _candidates(corners, in_front, height, width):
        weights, inside = _screen_weights(corners[face], pixel, width)
        face, pixel, weights = face[inside], pixel[inside], weights[inside]
        weights = weights * inverse_depth[face]
        total = weights.sum(axis=1)
        hit_depth = 1.0 / total
        # Nearest last: of repeated indices, numpy's assignment keeps the last one.
        order = np.argsort(-hit_depth, kind="stable")
        order = order[hit_depth[order] < best_depth[pixel[order]]]
        target = pixel[order]
        best_depth[target] = hit_depth[order]
        best_face[target] = face[order]
        best_weights[target] = weights[order] / total[order, None]
    return Fragments(
        face=best_face.reshape(height, width),
        weights=best_weights.reshape(height, width, 3),
        depth=best_depth.reshape(height, width),
    )


def _candidates(
    corners: NDArray[np.float64], usable: NDArray[np.int64], height: int, width: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield (face, pixel) pairs whose pixel centre lies in the face's bounding box, block by block."""
    limits = np.array([width - 1, height - 1])
    low = np.clip(np.ceil(corners[usable].min(axis=1) - 0.5), 0, limits + 1).astype(np.int64)
    high = np.clip(np.floor(corners[usable].max(axis=1) - 0.5), -1, limits).astype(np.int64)
    span = np.maximum(high - low + 1, 0)
    count = span[:, 0] * span[:, 1]
    keep = count > 0
    usable, low, span, count = usable[keep], low[keep], span[keep], count[keep]
    ends = np.cumsum(count)
    start = 0
    while start < len(usable):
        done = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + CANDIDATES_PER_BLOCK, side="right")))
        block = slice(start, stop)
        row = np.repeat(np.arange(start, stop), count[block])
        offset = np.arange(len(row)) - np.repeat(ends[block] - count[block] - done, count[block])
        y = low[row, 1] + offset // span[row, 0]
        x = low[row, 0] + offset % span[row, 0]
        yield usable[row], y * width + x
        start = stop


def _screen_weights(
    corners: NDArray[np.float64], pixel: NDArray[np.int64], width: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the pixel centre's weights in its face's projection, and whether it lies inside."""
    centre = np.stack([pixel % width + 0.5, pixel // width + 0.5], axis=1)
    a, b, c = (corners[:, i] - centre for i in range(3))
    area_a = b[:, 0] * c[:, 1] - b[:, 1] * c[:, 0]
    area_b = c[:, 0] * a[:, 1] - c[:, 1] * a[:, 0]
    area_c = a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]
    total = area_a + area_b + area_c
    safe = np.where(np.abs(total) < 1e-12, 1.0, total)
    weights = np.stack([area_a, area_b, area_c], axis=1) / safe[:, None]
    return weights, (np.abs(total) >= 1e-12) & (weights >= 0).all(axis=1)
