"""Solids to build sample products from: boxes, turned profiles, tubes, pillows, lofted sections.

Invariant: every solid is closed, y is up, lengths are metres. The products themselves are in
``catalog_shapes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import trimesh
from scipy.interpolate import CubicSpline

from scripts.catalog_model import Points


def box(width: float, height: float, depth: float, at: Sequence[float] = (0, 0, 0)) -> trimesh.Trimesh:
    """Return a box whose bottom centre is ``at``."""
    mesh = trimesh.creation.box((width, height, depth))
    mesh.apply_translation(np.add(at, (0, height / 2, 0)))
    return mesh


def pillow(
    width: float, height: float, depth: float, at: Sequence[float] = (0, 0, 0), *, roundness: float = 0.3
) -> trimesh.Trimesh:
    """Return a box with rounded edges whose bottom centre is ``at``; roundness 1 is an ellipsoid."""
    u, v = np.meshgrid(np.linspace(0, 2 * np.pi, 49)[:-1], np.linspace(-np.pi / 2, np.pi / 2, 25))
    x, z = (
        _power(np.cos(v), roundness) * _power(np.cos(u), roundness),
        _power(np.cos(v), roundness) * _power(np.sin(u), roundness),
    )
    y = _power(np.sin(v), roundness)
    rings = np.stack([x * width / 2, y * height / 2, z * depth / 2], axis=2) + np.add(at, (0, height / 2, 0))
    return loft(rings)


def turned(profile: Sequence[tuple[float, float]], at: Sequence[float] = (0, 0, 0)) -> trimesh.Trimesh:
    """Turn (radius, height) points about the y axis; give them from the bottom outwards."""
    dense = [np.array(profile[0], dtype=float)]
    for start, end in pairwise(profile):
        steps = max(1, int(np.hypot(end[0] - start[0], end[1] - start[1]) / 0.01))
        dense += [np.array(start) + (np.array(end) - start) * (i + 1) / steps for i in range(steps)]
    mesh = trimesh.creation.revolve(np.array(dense), sections=64)
    mesh.apply_transform(trimesh.transformations.rotation_matrix(-np.pi / 2, [1, 0, 0]))
    mesh.apply_translation(at)
    return mesh


def spline(points: Sequence[tuple[float, ...]], count: int = 48) -> Points:
    """Return ``count`` points on a smooth curve through ``points``."""
    knots = np.array(points, dtype=float)
    lengths = np.concatenate([[0], np.cumsum(np.linalg.norm(np.diff(knots, axis=0), axis=1))])
    return np.asarray(CubicSpline(lengths, knots)(np.linspace(0, lengths[-1], count)))


def smooth_profile(points: Sequence[tuple[float, float]], count: int = 48) -> list[tuple[float, float]]:
    """Return a smooth profile for ``turned`` through (radius, height) points."""
    return [(max(float(radius), 0.0), float(height)) for radius, height in spline(points, count)]


def tube(path: Points, radius: float | Sequence[float], *, sides: int = 16) -> trimesh.Trimesh:
    """Return a round bar along ``path``; the radius may change from start to end."""
    path = np.asarray(path, dtype=float)
    radii = np.interp(np.linspace(0, 1, len(path)), np.linspace(0, 1, np.size(radius)), np.atleast_1d(radius))
    tangents = np.gradient(path, axis=0)
    tangents /= np.linalg.norm(tangents, axis=1, keepdims=True)
    side = np.cross(tangents[0], [0.31, 0.42, 0.85])
    angles = np.linspace(0, 2 * np.pi, sides, endpoint=False)
    rings = []
    for point, tangent, size in zip(path, tangents, radii, strict=True):
        # Carry the frame along the curve, or the tube would twist where the path turns.
        side = side - tangent * (side @ tangent)
        side /= np.linalg.norm(side)
        other = np.cross(tangent, side)
        rings.append(point + size * (np.cos(angles)[:, None] * side + np.sin(angles)[:, None] * other))
    return loft(np.array(rings))


def loft(rings: Points) -> trimesh.Trimesh:
    """Join rings (n, points, 3) into a closed skin with both ends capped."""
    count, sides, _ = rings.shape
    ends = np.stack([rings[0].mean(axis=0), rings[-1].mean(axis=0)])
    vertices = np.concatenate([rings.reshape(-1, 3), ends])
    faces = []
    for ring in range(count - 1):
        a = ring * sides + np.arange(sides)
        b = ring * sides + (np.arange(sides) + 1) % sides
        faces += [np.stack([a, b, a + sides], axis=1), np.stack([b, b + sides, a + sides], axis=1)]
    first, following = np.arange(sides), (np.arange(sides) + 1) % sides
    last = (count - 1) * sides
    faces.append(np.stack([following, first, np.full(sides, count * sides)], axis=1))
    faces.append(np.stack([first + last, following + last, np.full(sides, count * sides + 1)], axis=1))
    mesh = trimesh.Trimesh(vertices, np.concatenate(faces), process=True)
    mesh.update_faces(mesh.nondegenerate_faces())
    mesh.fix_normals()
    return mesh


def ring(radius: float, thickness: float, at: Sequence[float]) -> trimesh.Trimesh:
    """Return a ring lying flat whose centre is ``at``."""
    mesh = trimesh.creation.torus(radius, thickness, major_sections=64, minor_sections=24)
    mesh.apply_transform(trimesh.transformations.rotation_matrix(np.pi / 2, [1, 0, 0]))
    mesh.apply_translation(at)
    return mesh


def joined(*meshes: trimesh.Trimesh) -> trimesh.Trimesh:
    """Return the meshes as one."""
    return trimesh.Trimesh(
        np.concatenate([mesh.vertices for mesh in meshes]),
        np.concatenate([mesh.faces + shift for mesh, shift in zip(meshes, _offsets(meshes), strict=True)]),
        process=False,
    )


def turned_about(
    mesh: trimesh.Trimesh, degrees: float, axis: Sequence[float], point: Sequence[float]
) -> trimesh.Trimesh:
    """Return the mesh turned about an axis through a point."""
    copy = mesh.copy()
    copy.apply_transform(trimesh.transformations.rotation_matrix(np.radians(degrees), axis, point))
    return copy


def _power(values: Points, exponent: float) -> Points:
    return np.asarray(np.sign(values) * np.abs(values) ** exponent)


def _offsets(meshes: Sequence[trimesh.Trimesh]) -> Sequence[int]:
    """Return the index of each mesh's first vertex once they are joined."""
    counts = [len(mesh.vertices) for mesh in meshes]
    return [sum(counts[:index]) for index in range(len(counts))]
