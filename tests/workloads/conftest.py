"""What the tests of the workloads share: the import path, one thread for torch, a photographed ball."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "dags"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from airflow_gpu_provider.catalog.product import Product  # noqa: E402
from scripts.catalog_model import Model, Part, plain  # noqa: E402
from scripts.catalog_photos import Shot, photograph  # noqa: E402

torch.set_num_threads(1)


def ball(radius: float = 0.1) -> Model:
    """Return a red ball on the ground."""
    mesh = trimesh.creation.icosphere(subdivisions=4, radius=radius)
    mesh.apply_translation((0, radius, 0))
    return Model([Part.from_mesh(mesh, plain(0.80, 0.25, 0.15))])


@pytest.fixture(scope="session")
def ball_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a catalogue folder with the photos of one ball in ``views/ball``."""
    folder = tmp_path_factory.mktemp("ball_catalog")
    photograph(ball(), folder / "views" / "ball", np.random.default_rng(3), Shot(views=18, size=96))
    return folder


@pytest.fixture
def make_product(tmp_path: Path) -> Callable[..., Product]:
    """Return a builder of products: ``make_product(catalog_folder, views="views/ball", steps=40)``."""

    def make(folder: Path, *, views: str = "views/ball", sku: str = "BALL", **params: object) -> Product:
        return Product(
            sku=sku,
            row={"sku": sku, "views": views},
            input_dir=folder,
            work_dir=tmp_path / "work",
            output_dir=tmp_path / "output",
            params=params,
        )

    return make
