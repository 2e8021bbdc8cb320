"""Read a product's photos, refusing what cannot become a model.

Invariant: what leaves this module is one array of equally large RGB photos, each matching its camera. The
next step is ``segmentation``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from airflow_gpu_provider.catalog.product import Product, ProductUnusable
from workloads.reconstruction.cameras import Cameras, load_cameras

#: Below this, a leg of a chair is thinner than a pixel.
MINIMUM_SIDE = 96

#: Photos are shrunk to this side: more pixels cost time and a voxel grid of demo size cannot show them.
MAXIMUM_SIDE = 256

CAMERAS_FILE = "cameras.json"


def views_folder(product: Product) -> Path:
    """Return the folder named in the manifest row; raise ProductUnusable if it is not there."""
    name = (product.row.get("views") or "").strip()
    if not name:
        raise ProductUnusable(
            f"{product.sku}: the manifest's column views is empty; name the folder that holds the photos and "
            f"{CAMERAS_FILE}, relative to the manifest"
        )
    folder = product.input_dir / name
    if not folder.is_dir():
        raise ProductUnusable(
            f"{product.sku}: views folder {name!r} does not exist beside the manifest; copy the photos "
            "there or correct the column views"
        )
    return folder


def load_photos(product: Product) -> tuple[NDArray[np.uint8], Cameras]:
    """Return photos (n, height, width, 3) and their cameras, shrunk to a size worth training on."""
    folder = views_folder(product)
    cameras = load_cameras(folder / CAMERAS_FILE)
    photos = [_load_photo(folder, name) for name in cameras.files]
    for name, photo in zip(cameras.files, photos, strict=True):
        _check_size(name, photo, cameras)
    height, width = cameras.size
    factor = MAXIMUM_SIDE / max(height, width)
    if factor >= 1:
        return np.stack([np.asarray(photo) for photo in photos]), cameras
    # The principal point must scale by what the rounded size really is, so resize in both axes alike.
    smaller = cameras.resized(factor)
    size = (smaller.size[1], smaller.size[0])
    shrunk = np.stack([np.asarray(photo.resize(size, Image.Resampling.BOX)) for photo in photos])
    exact = cameras.intrinsics.copy()
    exact[:, 0] *= size[0] / width
    exact[:, 1] *= size[1] / height
    return shrunk, replace(smaller, intrinsics=exact)


def _load_photo(folder: Path, name: str) -> Image.Image:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ProductUnusable(
            f"{CAMERAS_FILE} names {name!r}, which lies outside {folder.name}/; use plain file names"
        )
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except FileNotFoundError as error:
        raise ProductUnusable(
            f"photo {name} is listed in {CAMERAS_FILE} and missing in {folder.name}/; add it or "
            "remove its entry"
        ) from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise ProductUnusable(
            f"photo {name} in {folder.name}/ cannot be read ({type(error).__name__}: {error}); "
            "save it again as PNG"
        ) from error


def _check_size(name: str, photo: Image.Image, cameras: Cameras) -> None:
    if min(photo.size) < MINIMUM_SIDE:
        raise ProductUnusable(
            f"photo {name} has {photo.width}x{photo.height} pixels; at least {MINIMUM_SIDE}x{MINIMUM_SIDE} "
            "are needed: supply larger photos"
        )
    if (photo.height, photo.width) != cameras.size:
        raise ProductUnusable(
            f"photo {name} has {photo.width}x{photo.height} pixels, {CAMERAS_FILE} says "
            f"{cameras.size[1]}x{cameras.size[0]}; all photos must have the size that the "
            "cameras were measured with"
        )
