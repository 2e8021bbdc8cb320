"""Find models to photograph: any folder of OBJ, GLB, glTF, STL or PLY files, and Sweet Home 3D libraries.

A ``.sh3f`` file is a zip of OBJ models and a ``PluginFurnitureCatalog.properties`` with names, categories and
sizes in centimetres. Invariant: finding reads names only; a model is loaded when its turn comes, so that one
broken file costs one product. The next step is ``catalog_photos``.
"""

from __future__ import annotations

import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import trimesh
from numpy.typing import NDArray
from PIL import Image
from scipy.spatial import cKDTree

from scripts.catalog_model import Model, Paint, Part, Points, plain

SUFFIXES = (".obj", ".glb", ".gltf", ".stl", ".ply")

PROPERTIES = "PluginFurnitureCatalog.properties"

#: Colour of surfaces whose file says nothing.
UNPAINTED = (0.72, 0.70, 0.67)


class ModelUnreadable(ValueError):
    """A file cannot be photographed; the message says which and why."""


@dataclass(frozen=True)
class Found:
    """A model that could be loaded, and what its source says about it."""

    sku: str
    title: str
    category: str
    updated_at: datetime
    load: Callable[[], Model]


def find_models(source: Path) -> list[Found]:
    """Return the models in a folder, a ``.sh3f`` library or a single model file, with distinct skus."""
    found: list[Found] = []
    paths = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    for path in paths:
        if path.suffix.lower() == ".sh3f":
            found += _library(path)
        elif path.suffix.lower() in SUFFIXES:
            found.append(_single(path, source))
    seen: dict[str, int] = {}
    distinct = []
    for model in found:
        count = seen[model.sku] = seen.get(model.sku, 0) + 1
        distinct.append(model if count == 1 else replace(model, sku=f"{model.sku}-{count}"))
    return distinct


def _single(path: Path, source: Path) -> Found:
    folder = path.parent.name if path.parent != source and source.is_dir() else "models"
    return Found(
        sku=_sku(path.stem),
        title=path.stem.replace("_", " ").replace("-", " ").strip().capitalize() or path.name,
        category=folder,
        updated_at=datetime.fromtimestamp(int(path.stat().st_mtime), tz=timezone.utc),
        load=lambda: _with_known_size(load_model(path)),
    )


def _library(path: Path) -> Iterator[Found]:
    """Yield the pieces of a Sweet Home 3D furniture library that are furniture and have an OBJ model."""
    updated_at = datetime.fromtimestamp(int(path.stat().st_mtime), tz=timezone.utc)
    with zipfile.ZipFile(path) as archive:
        text = archive.read(PROPERTIES).decode("latin-1")
    for piece in parse_properties(text):
        model = piece.get("model", "").lstrip("/")
        if not model.lower().endswith(".obj") or piece.get("doorOrWindow") == "true":
            continue
        identity = piece.get("id", "").split("#")[-1] or Path(model).stem
        yield Found(
            sku=_sku(f"{path.stem}-{identity}"),
            title=piece.get("name") or identity,
            category=piece.get("category") or "furniture",
            updated_at=updated_at,
            load=lambda piece=piece, model=model: _load_piece(path, model, piece),  # type: ignore[misc]
        )


def parse_properties(text: str) -> list[dict[str, str]]:
    """Return the numbered pieces of a furniture catalogue, in order of their numbers."""
    pieces: dict[int, dict[str, str]] = {}
    for line in text.splitlines():
        match = re.match(r"\s*(\w+)#(\d+)\s*[=:]\s*(.*)", line)
        if match:
            value = re.sub(r"\\u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), match[3])
            pieces.setdefault(int(match[2]), {})[match[1]] = value.replace("\\", "").strip()
    return [pieces[number] for number in sorted(pieces)]


def _load_piece(library: Path, member: str, piece: dict[str, str]) -> Model:
    """Unpack one model with its materials and textures, and give it the size the catalogue states."""
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(library) as archive:
        prefix = member.rsplit("/", 1)[0] + "/"
        root = Path(scratch).resolve()
        for name in archive.namelist():
            # zipfile cleans names, yet what lies outside the scratch folder is not ours to write.
            if name.startswith(prefix) and (root / name).resolve().is_relative_to(root):
                archive.extract(name, scratch)
        model = load_model(Path(scratch) / member)
    if rotation := piece.get("modelRotation"):
        model = _turned(model, np.array([float(value) for value in rotation.split()]).reshape(3, 3))
    size = [float(piece.get(side, 0)) / 100 for side in ("width", "height", "depth")]
    return model.resized(np.array(size)) if min(size) > 0 else _with_known_size(model)


def load_model(path: Path) -> Model:
    """Load a file as painted parts; raise ModelUnreadable if it holds no surface."""
    try:
        scene = trimesh.load_scene(path)
        geometries = [mesh for mesh in scene.dump() if isinstance(mesh, trimesh.Trimesh) and len(mesh.faces)]
        parts = [_part(mesh) for mesh in geometries]
    except Exception as error:  # a foreign file can fail in any way inside the reader; it costs one product
        raise ModelUnreadable(f"{path.name} cannot be loaded ({type(error).__name__}: {error})") from error
    if not parts:
        raise ModelUnreadable(f"{path.name} holds no triangles")
    return Model(parts)


def _part(mesh: trimesh.Trimesh) -> Part:
    return Part.from_mesh(mesh, _paint(mesh), smooth=0.6)


def _paint(mesh: trimesh.Trimesh) -> Paint:
    """Return what a file says about a surface: texture, material, colours of corners or faces, or a grey."""
    visual: Any = mesh.visual
    material = getattr(visual, "material", None)
    image = getattr(material, "image", None) or getattr(material, "baseColorTexture", None)
    if image is not None and getattr(visual, "uv", None) is not None:
        return _textured(image)
    if material is not None and getattr(material, "main_color", None) is not None:
        return plain(*(float(value) / 255 for value in material.main_color[:3]))
    if visual.kind == "vertex":
        return _nearest(np.asarray(mesh.vertices), np.asarray(visual.vertex_colors))
    if visual.kind == "face":
        return _nearest(np.asarray(mesh.triangles_center), np.asarray(visual.face_colors))
    return plain(*UNPAINTED)


def _nearest(places: Points, colours: NDArray[np.uint8]) -> Paint:
    """Paint each point like the nearest of ``places``."""
    tree, table = cKDTree(places), colours[:, :3] / 255
    return lambda points, uv: np.asarray(table[tree.query(points)[1]])


def _textured(image: Image.Image) -> Paint:
    """Look colours up in a repeating texture, shrunk so that distant texels do not flicker."""
    small = image.convert("RGB")
    small.thumbnail((256, 256))
    texels = np.asarray(small, dtype=np.float64) / 255

    def paint(points: Points, uv: Points) -> Points:
        columns = (uv[:, 0] % 1 * texels.shape[1]).astype(int).clip(0, texels.shape[1] - 1)
        rows = ((1 - uv[:, 1] % 1) * texels.shape[0]).astype(int).clip(0, texels.shape[0] - 1)
        return np.asarray(texels[rows, columns])

    return paint


def _turned(model: Model, rotation: Points) -> Model:
    def turn(part: Part) -> Part:
        return replace(
            part,
            vertices=part.vertices @ rotation.T,
            normals=part.normals @ rotation.T,
            paint=lambda points, uv: part.paint(points @ rotation, uv),
        )

    return Model([turn(part) for part in model.parts])


def _with_known_size(model: Model) -> Model:
    """Scale a model of unknown unit to one metre and put it on the ground."""
    low, high = model.bounds
    return model.resized((high - low) / max(float((high - low).max()), 1e-9))


def _sku(text: str) -> str:
    """Return a name that is safe as a sku: letters, digits, dots, dashes and underscores."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:80]
    return cleaned or "model"
