"""Read, check and normalise the cameras of a product's photos.

``cameras.json`` holds width, height and per view a file, a 4x4 ``camera_to_world`` and ``fx fy cx cy`` in
pixels. Cameras have OpenCV axes (x right, y down, z forward); the world is y-up, in any unit.

Invariant: every camera that leaves this module is a proper rotation plus translation and looks at one common
region. Normalising moves that region to the unit sphere. The next step is in ``photos`` and ``preprocess``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from airflow_gpu_provider.catalog.product import ProductUnusable
from workloads.reconstruction.raster import inverse

#: Fewer views than this leave whole sides of a product unseen.
MINIMUM_VIEWS = 16

#: A rotation matrix read from a text file is orthonormal to about its printed digits.
ROTATION_TOLERANCE = 1e-3

#: An optical axis may pass the common centre at this share of the camera's distance, not farther.
AIM_TOLERANCE = 0.25


@dataclass(frozen=True)
class Cameras:
    """Pinhole cameras of one product, all of one image size."""

    #: photo file of each view, relative to the views folder
    files: tuple[str, ...]
    #: pinhole matrices in pixels; (n, 3, 3)
    intrinsics: NDArray[np.float64]
    #: camera-to-world matrices; (n, 4, 4)
    poses: NDArray[np.float64]
    #: (height, width) in pixels
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.files)

    @property
    def world_to_camera(self) -> NDArray[np.float64]:
        """Inverse of the poses."""
        return inverse(self.poses)

    @property
    def centres(self) -> NDArray[np.float64]:
        """Where the cameras stand; (n, 3)."""
        return self.poses[:, :3, 3]

    def normalised(self, centre: NDArray[np.float64], radius: float) -> Cameras:
        """Return the cameras in the frame where the sphere (centre, radius) is the unit sphere."""
        poses = self.poses.copy()
        poses[:, :3, 3] = (poses[:, :3, 3] - centre) / radius
        return replace(self, poses=poses)

    def resized(self, factor: float) -> Cameras:
        """Return the cameras for images ``factor`` times as large."""
        intrinsics = self.intrinsics.copy()
        intrinsics[:, :2] *= factor
        size = (round(self.size[0] * factor), round(self.size[1] * factor))
        return replace(self, intrinsics=intrinsics, size=size)

    def rays(self, view: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return origin (3,) and unit directions (height * width, 3) through the pixel centres."""
        height, width = self.size
        rows, columns = np.mgrid[0:height, 0:width] + 0.5
        matrix = self.intrinsics[view]
        x = (columns.ravel() - matrix[0, 2]) / matrix[0, 0]
        y = (rows.ravel() - matrix[1, 2]) / matrix[1, 1]
        local = np.stack([x, y, np.ones_like(x)], axis=1)
        world = local @ self.poses[view, :3, :3].T
        return self.poses[view, :3, 3], world / np.linalg.norm(world, axis=1, keepdims=True)


def load_cameras(path: Path) -> Cameras:
    """Read ``cameras.json``; raise ProductUnusable naming what is wrong and what is allowed."""
    document = _read_document(path)
    views = document.get("views")
    if not isinstance(views, list) or len(views) < MINIMUM_VIEWS:
        given = len(views) if isinstance(views, list) else 0
        raise ProductUnusable(
            f"{path.name} lists {given} views; at least {MINIMUM_VIEWS} are needed so that every side is "
            "seen: photograph the product from more directions"
        )
    try:
        size = (int(document["height"]), int(document["width"]))
        files = tuple(str(view["file"]) for view in views)
        poses = np.array([view["camera_to_world"] for view in views], dtype=np.float64)
        intrinsics = np.stack([_pinhole(view["intrinsics"]) for view in views])
    except (KeyError, TypeError, ValueError) as error:
        raise ProductUnusable(
            f"{path.name} is not complete ({type(error).__name__}: {error}); it needs width, height, and for "
            "each view file, intrinsics (fx, fy, cx, cy) and a 4x4 camera_to_world"
        ) from error
    cameras = Cameras(files, intrinsics, poses, size)
    _check_matrices(cameras, path.name)
    return cameras


def look_at_sphere(cameras: Cameras) -> tuple[NDArray[np.float64], float]:
    """Return the sphere (centre, radius) that all cameras see whole; raise ProductUnusable if there is none.

    The centre is the point nearest to all optical axes (least squares), the radius the largest that fits
    into every view, so it depends on the rig alone and not on the product.
    """
    axes = cameras.poses[:, :3, 2]
    across = np.eye(3) - axes[:, :, None] * axes[:, None, :]
    spread = np.linalg.eigvalsh(across.sum(axis=0))[0] / len(cameras)
    if spread < 1e-3:
        raise ProductUnusable(
            "all cameras look in the same direction, so depth cannot be known; photos from all round the "
            "product are needed: check camera_to_world in cameras.json"
        )
    centre = np.linalg.solve(across.sum(axis=0), np.einsum("nij,nj->i", across, cameras.centres))
    to_centre = centre - cameras.centres
    distance = np.linalg.norm(to_centre, axis=1)
    along = np.einsum("ni,ni->n", to_centre, axes)
    miss = np.linalg.norm(to_centre - along[:, None] * axes, axis=1) / np.maximum(distance, 1e-12)
    wrong = np.flatnonzero((along <= 0) | (miss > AIM_TOLERANCE))
    if len(wrong):
        raise ProductUnusable(
            f"{len(wrong)} of {len(cameras)} cameras do not look at the common centre (first: "
            f"{cameras.files[wrong[0]]}); every camera must face the product: check that camera_to_world has "
            "OpenCV axes (x right, y down, z forward) and is not its inverse"
        )
    return centre, float((np.sin(_half_angles(cameras)) * distance).min())


def _half_angles(cameras: Cameras) -> NDArray[np.float64]:
    """Return per view the angle between the optical axis and the nearest image border."""
    height, width = cameras.size
    matrix = cameras.intrinsics
    horizontal = np.minimum(matrix[:, 0, 2], width - matrix[:, 0, 2]) / matrix[:, 0, 0]
    vertical = np.minimum(matrix[:, 1, 2], height - matrix[:, 1, 2]) / matrix[:, 1, 1]
    return np.asarray(np.arctan(np.minimum(horizontal, vertical)))


def _read_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ProductUnusable(
            f"no {path.name} in {path.parent.name}/: every product needs its photos' cameras there"
        ) from error
    except (OSError, ValueError) as error:
        raise ProductUnusable(f"{path.name} cannot be read as JSON ({error}); write it again") from error
    if not isinstance(document, dict):
        raise ProductUnusable(f"{path.name} holds a {type(document).__name__}; an object is needed")
    return document


def _pinhole(values: dict[str, float]) -> NDArray[np.float64]:
    fx, fy, cx, cy = (float(values[name]) for name in ("fx", "fy", "cx", "cy"))
    return np.array([[fx, 0.0, cx], [0.0, fy, cy], [0.0, 0.0, 1.0]])


def _check_matrices(cameras: Cameras, name: str) -> None:
    if cameras.poses.shape[1:] != (4, 4):
        raise ProductUnusable(f"{name}: camera_to_world has shape {cameras.poses.shape[1:]}; 4x4 is needed")
    for index, file in enumerate(cameras.files):
        pose, pinhole = cameras.poses[index], cameras.intrinsics[index]
        if not (np.isfinite(pose).all() and np.isfinite(pinhole).all()):
            raise ProductUnusable(f"{name}: the camera of {file} holds NaN or infinity; give finite numbers")
        rotation = pose[:3, :3]
        residual = float(np.abs(rotation @ rotation.T - np.eye(3)).max())
        if residual > ROTATION_TOLERANCE or np.linalg.det(rotation) < 0:
            raise ProductUnusable(
                f"{name}: the rotation of {file} is off by {residual:.3g} (determinant "
                f"{np.linalg.det(rotation):.3g}); allowed is {ROTATION_TOLERANCE} with determinant +1: "
                "give a rotation without scale or mirror"
            )
        half = (cameras.size[1] / 2, cameras.size[0] / 2)
        if min(pinhole[0, 0], pinhole[1, 1]) <= 0 or not _principal_point_inside(pinhole, half):
            raise ProductUnusable(
                f"{name}: intrinsics of {file} are not usable (fx {pinhole[0, 0]:.4g}, "
                f"fy {pinhole[1, 1]:.4g}, cx {pinhole[0, 2]:.4g}, cy {pinhole[1, 2]:.4g}); fx and fy must be "
                f"positive and (cx, cy) near the middle of {cameras.size[1]}x{cameras.size[0]} pixels"
            )


def _principal_point_inside(pinhole: NDArray[np.float64], half: tuple[float, float]) -> bool:
    return bool(abs(pinhole[0, 2] - half[0]) < half[0] * 0.8 and abs(pinhole[1, 2] - half[1]) < half[1] * 0.8)
