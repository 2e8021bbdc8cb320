"""The model that is photographed: triangles with normals, and what each part's surface looks like.

Invariant: y is up and lengths are metres, so a product and its reconstruction agree in size. Faces may have
any winding; the photographer shades both sides. The next step is ``catalog_photos``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import trimesh
from numpy.typing import NDArray

Points = NDArray[np.float64]
#: (points (n, 3), texture coordinates (n, 2)) -> colours (n, 3) between 0 and 1
Paint = Callable[[Points, Points], Points]


@dataclass(frozen=True)
class Part:
    """Some triangles of one surface."""

    vertices: Points
    faces: NDArray[np.int64]
    paint: Paint
    #: one normal per vertex
    normals: Points
    #: one texture coordinate per vertex; zeros where there are none
    uv: Points
    #: strength of the highlight, 0 matt to 1 glazed
    gloss: float = 0.0

    @classmethod
    def from_mesh(
        cls, mesh: trimesh.Trimesh, paint: Paint, *, gloss: float = 0.0, smooth: float = 0.7
    ) -> Part:
        """Take a mesh; edges sharper than ``smooth`` radians stay edges."""
        vertices = np.asarray(mesh.vertices, dtype=np.float64)
        corners = np.asarray(mesh.faces, dtype=np.int64).ravel()
        uv = getattr(mesh.visual, "uv", None)
        return cls(
            vertices=vertices[corners],
            faces=np.arange(len(corners)).reshape(-1, 3),
            paint=paint,
            normals=corner_normals(vertices[corners].reshape(-1, 3, 3), smooth),
            uv=np.zeros((len(corners), 2)) if uv is None else np.asarray(uv, dtype=np.float64)[corners],
            gloss=gloss,
        )

    def transformed(self, scale: Points, shift: Points) -> Part:
        """Scale each axis, then move; normals follow."""
        normals = self.normals / scale
        normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
        # Paints see the part's own coordinates, or a pattern would slide over a moved part.
        paint = self.paint
        return Part(
            vertices=self.vertices * scale + shift,
            faces=self.faces,
            paint=lambda points, uv: paint((points - shift) / scale, uv),
            normals=normals,
            uv=self.uv,
            gloss=self.gloss,
        )


@dataclass(frozen=True)
class Model:
    """One product as parts."""

    parts: Sequence[Part]

    @property
    def bounds(self) -> tuple[Points, Points]:
        """Lowest and highest corner."""
        vertices = np.concatenate([part.vertices for part in self.parts])
        return vertices.min(axis=0), vertices.max(axis=0)

    def bounding_sphere(self) -> tuple[Points, float]:
        """Return a sphere round the middle of the bounding box that holds every vertex."""
        low, high = self.bounds
        centre = (low + high) / 2
        vertices = np.concatenate([part.vertices for part in self.parts])
        return centre, float(np.linalg.norm(vertices - centre, axis=1).max())

    def resized(self, size: Points) -> Model:
        """Return the model scaled to fill a box of ``size``, standing on the ground over the origin."""
        low, high = self.bounds
        scale = np.asarray(size) / np.maximum(high - low, 1e-9)
        shift = -np.array([(low[0] + high[0]) / 2, low[1], (low[2] + high[2]) / 2]) * scale
        return Model([part.transformed(scale, shift) for part in self.parts])


def corner_normals(triangles: Points, smooth: float) -> Points:
    """Return a normal per corner (3 n, 3): the mean over the faces there that bend less than ``smooth``.

    Corners meet by position and not by index, so a texture's seam does not show as an edge.
    """
    normals = np.cross(triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0])
    units = normals / np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-20)
    places = triangles.reshape(-1, 3)
    grain = max(float(np.ptp(places, axis=0).max()), 1e-12) * 1e-6
    _, place = np.unique(np.round(places / grain).astype(np.int64), axis=0, return_inverse=True)
    place = place.ravel()
    order, count = np.argsort(place, kind="stable"), np.bincount(place)
    start = np.cumsum(count) - count
    # Every corner meets every corner of its place once: (mine, other) pairs in two flat lists.
    meets = count[place]
    mine = np.repeat(np.arange(len(place)), meets)
    offset = np.arange(len(mine)) - np.repeat(np.cumsum(meets) - meets, meets)
    other = order[start[place[mine]] + offset]
    near = (units[mine // 3] * units[other // 3]).sum(axis=1) > np.cos(smooth)
    mine, other = mine[near], other[near]
    total = np.stack(
        [np.bincount(mine, normals[other // 3, axis], minlength=len(place)) for axis in range(3)], axis=1
    )
    length = np.linalg.norm(total, axis=1, keepdims=True)
    return np.where(length > 1e-20, total / np.maximum(length, 1e-20), np.repeat(units, 3, axis=0))


def plain(red: float, green: float, blue: float) -> Paint:
    """Paint everything in one colour."""
    colour = np.array([red, green, blue])
    return lambda points, uv: np.broadcast_to(colour, points.shape).copy()


def banded(first: Paint, second: Paint, wave: Callable[[Points], Points]) -> Paint:
    """Paint with ``first`` where ``wave(points)`` is positive, else with ``second``."""

    def paint(points: Points, uv: Points) -> Points:
        choose = (wave(points) > 0)[:, None]
        return np.where(choose, first(points, uv), second(points, uv))

    return paint


def wood(red: float, green: float, blue: float, *, axis: int = 0, scale: float = 60.0) -> Paint:
    """Paint with soft grain that runs along ``axis``."""
    colour = np.array([red, green, blue])
    across = [i for i in range(3) if i != axis]

    def paint(points: Points, uv: Points) -> Points:
        ring = np.sin(points[:, across[0]] * scale + 2.2 * np.sin(points[:, across[1]] * scale * 0.7))
        grain = 1.0 + 0.10 * ring + 0.04 * np.sin(points[:, axis] * scale * 0.5)
        return np.clip(colour * grain[:, None], 0, 1)

    return paint


OAK = wood(0.80, 0.58, 0.34, axis=1)
WALNUT = wood(0.46, 0.28, 0.17, axis=0, scale=45)
BRASS = plain(0.83, 0.66, 0.30)
CREAM = plain(0.95, 0.90, 0.80)
