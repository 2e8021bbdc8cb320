"""Draw the finished mesh as a shop would show it: from the front, a little from above, on light paper.

Invariant: only the mesh and its vertex colours are drawn, so the picture shows what the GLB holds. Used by
``postprocess``.
"""

from __future__ import annotations

import numpy as np
import trimesh
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter

from workloads.reconstruction.cameras import Cameras
from workloads.reconstruction.quality import draw_mesh

SIDE = 320

#: From the front right, slightly above; where a product's face usually is.
AZIMUTH, ELEVATION = np.radians(32.0), np.radians(20.0)

#: Share of the picture's half side that the product fills.
FILL = 0.80

PAPER = np.array([0.955, 0.960, 0.968])


def draw_thumbnail(mesh: trimesh.Trimesh, colours: NDArray[np.float64], side: int = SIDE) -> Image.Image:
    """Return a square picture of the mesh."""
    camera = _camera(mesh, side)
    image, coverage = draw_mesh(mesh, colours, camera, 0)
    paper = _paper(camera, mesh, coverage, side)
    composed = image + (1 - coverage[..., None]) * paper
    return Image.fromarray(np.clip(np.round(composed * 255), 0, 255).astype(np.uint8))


def _camera(mesh: trimesh.Trimesh, side: int) -> Cameras:
    """Return one camera that looks at the mesh and frames it tightly."""
    vertices = np.asarray(mesh.vertices)
    centre = (vertices.min(axis=0) + vertices.max(axis=0)) / 2
    radius = float(np.linalg.norm(vertices - centre, axis=1).max())
    direction = np.array(
        [np.cos(ELEVATION) * np.sin(AZIMUTH), np.sin(ELEVATION), np.cos(ELEVATION) * np.cos(AZIMUTH)]
    )
    forward = -direction
    right = np.cross(forward, [0.0, 1.0, 0.0])
    right /= np.linalg.norm(right)
    pose = np.eye(4)
    pose[:3, 0], pose[:3, 1], pose[:3, 2] = right, np.cross(forward, right), forward
    pose[:3, 3] = centre + direction * radius * 4.5
    local = (vertices - pose[:3, 3]) @ pose[:3, :3]
    flat = local[:, :2] / local[:, 2:]
    low, high = flat.min(axis=0), flat.max(axis=0)
    focal = FILL * side / float((high - low).max())
    middle = (low + high) / 2 * focal
    pinhole = np.array([[focal, 0, side / 2 - middle[0]], [0, focal, side / 2 - middle[1]], [0, 0, 1]])
    return Cameras(("thumbnail",), pinhole[None], pose[None], (side, side))


def _paper(
    camera: Cameras, mesh: trimesh.Trimesh, coverage: NDArray[np.float64], side: int
) -> NDArray[np.float64]:
    """Return light paper with a soft shadow where the product stands, so that it does not float."""
    vertices = np.asarray(mesh.vertices)
    ground = vertices[:, 1].min()
    low = vertices[vertices[:, 1] < ground + 0.06 * np.ptp(vertices[:, 1])].copy()
    low[:, 1] = ground
    local = (low - camera.poses[0, :3, 3]) @ camera.poses[0, :3, :3]
    pinhole = camera.intrinsics[0]
    columns = (local[:, 0] / local[:, 2] * pinhole[0, 0] + pinhole[0, 2]).astype(int).clip(0, side - 1)
    rows = (local[:, 1] / local[:, 2] * pinhole[1, 1] + pinhole[1, 2]).astype(int).clip(0, side - 1)
    shadow = np.zeros((side, side))
    shadow[rows, columns] = 1.0
    shadow = gaussian_filter(shadow, side / 60) + 0.6 * gaussian_filter(shadow, side / 22)
    shadow /= max(float(shadow.max()), 1e-9)
    y, x = np.mgrid[0:side, 0:side] / (side - 1) - 0.5
    vignette = 1 - 0.10 * (x**2 + y**2)
    return np.asarray(PAPER * (vignette * (1 - 0.28 * shadow))[..., None])
