"""Stage 3 (CPU): a mesh with colours, files that a shop can show, and honest figures.

Writes ``model.glb`` (in the photographer's frame and unit, y-up), ``thumbnail.png`` and ``report.json`` into
the product's output folder. A product below a threshold is published and marked, never hidden. Entry point
``workloads.reconstruction.postprocess:postprocess``; the run's page is made by ``gallery``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import trimesh
from numpy.typing import NDArray

from airflow_gpu_provider.catalog.product import Product, ProductUnusable
from workloads.reconstruction.colouring import vertex_colours
from workloads.reconstruction.field import load_distance
from workloads.reconstruction.figures import read_figures
from workloads.reconstruction.prepared import Prepared
from workloads.reconstruction.quality import Quality, score
from workloads.reconstruction.surface import EmptySurface, extract_mesh
from workloads.reconstruction.thumbnail import draw_thumbnail

#: Held-out figures that a product must reach not to be marked; the parameters min_iou and min_psnr override.
THRESHOLDS = {"iou": 0.90, "psnr": 20.0}


def postprocess(product: Product) -> Mapping[str, object]:
    """Extract, colour, score and write the model; return the figures of its report."""
    started = time.monotonic()
    thresholds = {
        name: float(str(product.params.get(f"min_{name}", default))) for name, default in THRESHOLDS.items()
    }
    prepared = Prepared.load(product.work_dir)
    distance, grid = load_distance(product.work_dir)
    try:
        mesh = extract_mesh(distance, grid)
    except EmptySurface as error:
        raise ProductUnusable(f"{product.sku}: {error}") from error
    colours = vertex_colours(
        mesh, prepared.photos, prepared.coverage, prepared.cameras, prepared.training_views
    )
    quality = score(mesh, colours, prepared)
    missed = shortfall(quality, thresholds)
    figures: dict[str, object] = {
        "iou": round(quality.iou, 4),
        "psnr": round(quality.psnr, 2),
        "worst_iou": round(quality.worst_iou, 4),
        "held_out_views": quality.views,
        "vertices": len(mesh.vertices),
        "faces": len(mesh.faces),
        "watertight": bool(mesh.is_watertight),
        "below_threshold": bool(missed),
        "shortfall": "; ".join(missed),
    }
    product.output_dir.mkdir(parents=True, exist_ok=True)
    export_glb(mesh, colours, prepared, product.output_dir / "model.glb")
    draw_thumbnail(mesh, colours).save(product.output_dir / "thumbnail.png", optimize=True)
    figures["seconds"] = round(time.monotonic() - started, 3)
    _write_report(product, figures, thresholds)
    return figures


def shortfall(quality: Quality, thresholds: Mapping[str, float]) -> list[str]:
    """Return a sentence for each threshold that a product misses."""
    reached = {"iou": quality.iou, "psnr": quality.psnr}
    return [
        f"{name} {reached[name]:.3g} on held-out views, at least {limit:g} is wanted"
        for name, limit in thresholds.items()
        if reached[name] < limit
    ]


def _write_report(product: Product, figures: Mapping[str, object], thresholds: Mapping[str, float]) -> None:
    """Write ``report.json``: figures, thresholds, and the seconds and device of every stage."""
    earlier = {stage: read_figures(product.work_dir, stage) for stage in ("preprocess", "train")}
    report = {
        "sku": product.sku,
        **figures,
        "thresholds": dict(thresholds),
        "seconds": {
            **{stage: known.get("seconds") for stage, known in earlier.items()},
            "postprocess": figures["seconds"],
        },
        "device": earlier["train"].get("device"),
    }
    text = json.dumps(report, indent=2) + "\n"
    (product.output_dir / "report.json").write_text(text, encoding="utf-8")


def export_glb(mesh: trimesh.Trimesh, colours: NDArray[np.float64], prepared: Prepared, path: Path) -> None:
    """Write the mesh in the photographer's frame and unit."""
    rgba = np.full((len(colours), 4), 255, dtype=np.uint8)
    # glTF takes vertex colours as linear light, photos are sRGB: without this a viewer shows them too pale.
    rgba[:, :3] = np.round(_linear(colours) * 255)
    exported = trimesh.Trimesh(
        np.asarray(mesh.vertices) * prepared.radius + prepared.centre,
        mesh.faces,
        vertex_colors=rgba,
        process=False,
    )
    scene = trimesh.Scene(exported)
    path.write_bytes(trimesh.exchange.gltf.export_glb(scene, include_normals=True, tree_postprocessor=_unlit))


def _unlit(tree: dict[str, Any]) -> None:
    """Ask viewers not to shade the model: the light of the photos is already in its colours."""
    tree["extensionsUsed"] = [*tree.get("extensionsUsed", []), "KHR_materials_unlit"]
    tree["materials"] = [
        {
            "name": "photographed",
            "pbrMetallicRoughness": {"metallicFactor": 0.0, "roughnessFactor": 0.9},
            "extensions": {"KHR_materials_unlit": {}},
        }
    ]
    for mesh in tree["meshes"]:
        for primitive in mesh["primitives"]:
            primitive["material"] = 0


def _linear(colours: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return linear light for sRGB values."""
    return np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
