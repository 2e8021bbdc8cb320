from __future__ import annotations

import csv
import zipfile
from pathlib import Path

import numpy as np
import pytest
import trimesh
from PIL import Image
from workloads.reconstruction.cameras import load_cameras, look_at_sphere

from scripts.catalog_import import find_models, load_model, parse_properties
from scripts.catalog_model import Part, corner_normals, plain
from scripts.catalog_shapes import SAMPLES
from scripts.render_catalog import COLUMNS, main

SAMPLE = Path(__file__).resolve().parents[2] / "dags" / "sample_catalog"

OBJ = """mtllib box.mtl
v 0 0 0
v 2 0 0
v 2 1 0
v 0 1 0
v 0 0 1
v 2 0 1
v 2 1 1
v 0 1 1
usemtl red
f 1 2 3 4
f 5 6 7 8
usemtl blue
f 1 2 6 5
f 4 3 7 8
f 1 4 8 5
f 2 3 7 6
"""
MTL = "newmtl red\nKd 0.9 0.1 0.1\nnewmtl blue\nKd 0.1 0.2 0.9\n"

PROPERTIES = """# comment
name=A library
id#1=Maker#red-box
name#1=Red box (caf\\u00e9)
category#1=Living room
model#1=/maker/red-box/box.obj
width#1=120.0
depth#1=60
height#1=40.0
id#2=Maker#door
name#2=Door
model#2=/maker/red-box/box.obj
doorOrWindow#2=true
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Return a folder with a Sweet Home 3D library and two plain models, one of them broken."""
    folder = tmp_path / "models"
    (folder / "chairs").mkdir(parents=True)
    with zipfile.ZipFile(folder / "lib.sh3f", "w") as archive:
        archive.writestr("PluginFurnitureCatalog.properties", PROPERTIES)
        archive.writestr("maker/red-box/box.obj", OBJ)
        archive.writestr("maker/red-box/box.mtl", MTL)
    trimesh.creation.icosphere(subdivisions=2).export(folder / "chairs" / "Bean bag 2.stl")
    (folder / "broken.obj").write_text("this is no model")
    return folder


def read(catalog: Path) -> list[dict[str, str]]:
    with (catalog / "catalog.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_libraries_and_single_files_become_products_and_broken_files_are_named(
    library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "catalog"
    assert main(["--models", str(library), "--output", str(output), "--views", "16", "--size", "96"]) == 0
    rows = {row["sku"]: row for row in read(output)}
    assert set(rows) == {"Bean-bag-2", "lib-red-box"}
    assert rows["lib-red-box"]["title"] == "Red box (café)"
    assert rows["lib-red-box"]["category"] == "Living room"
    assert rows["Bean-bag-2"]["category"] == "chairs"
    for row in rows.values():
        assert tuple(row) == COLUMNS
        assert len(list((output / row["views"]).glob("*.png"))) == 16
        assert load_cameras(output / row["views"] / "cameras.json").size == (96, 96)
    assert "broken.obj" in capsys.readouterr().err


def test_a_piece_has_the_size_and_the_colours_its_library_states(library: Path) -> None:
    piece = next(found for found in find_models(library / "lib.sh3f"))
    model = piece.load()
    low, high = model.bounds
    assert high - low == pytest.approx([1.2, 0.4, 0.6])
    assert low[1] == pytest.approx(0)
    colours = {tuple(np.round(part.paint(part.vertices, part.uv)[0], 1)) for part in model.parts}
    assert colours == {(0.9, 0.1, 0.1), (0.1, 0.2, 0.9)}


def test_colours_of_vertices_and_of_faces_are_seen(tmp_path: Path) -> None:
    mesh = trimesh.creation.box()
    mesh.visual.vertex_colors = np.where(mesh.vertices[:, :1] > 0, [[250, 0, 0, 255]], [[0, 0, 250, 255]])
    mesh.export(tmp_path / "vertices.ply")
    faced = trimesh.creation.box()
    faced.visual.face_colors = np.where(faced.face_normals[:, :1] > 0.5, [[0, 250, 0, 255]], [[9, 9, 9, 255]])
    faced.export(tmp_path / "faces.ply")
    for name, side, colour in (
        ("vertices", 0.4, (250, 0, 0)),
        ("vertices", -0.4, (0, 0, 250)),
        ("faces", 0.5, (0, 250, 0)),
    ):
        part = load_model(tmp_path / f"{name}.ply").parts[0]
        assert part.paint(np.array([[side, 0.1, 0.2]]), np.zeros((1, 2)))[0] * 255 == pytest.approx(
            colour, abs=1
        )


def test_properties_are_read_with_their_escapes() -> None:
    pieces = parse_properties(PROPERTIES)
    assert [piece["name"] for piece in pieces] == ["Red box (café)", "Door"]


def test_models_of_one_name_get_different_skus(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        trimesh.creation.box().export(tmp_path / folder / "box.stl")
    assert [found.sku for found in find_models(tmp_path)] == ["box", "box-2"]


@pytest.mark.parametrize(("given", "message"), [("missing", "does not exist"), ("", "no models in")])
def test_folder_without_models_is_refused(
    given: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    source = tmp_path / (given or "empty")
    assert main(["--models", str(source), "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_the_committed_sample_is_what_the_script_renders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bottle = tuple(sample for sample in SAMPLES if sample.sku == "KT-004")
    monkeypatch.setattr("scripts.render_catalog.SAMPLES", bottle)
    assert main(["--output", str(tmp_path)]) == 0
    committed, rendered = SAMPLE / "views" / "KT-004", tmp_path / "views" / "KT-004"
    assert (rendered / "cameras.json").read_text() == (committed / "cameras.json").read_text()
    for path in sorted(rendered.glob("*.png")):
        first, second = (
            np.asarray(Image.open(folder / path.name)).astype(int) for folder in (rendered, committed)
        )
        # Another processor may round a pixel the other way; it cannot move an edge.
        assert np.abs(first - second).mean() < 0.05


def test_the_sample_is_big_and_varied_enough_and_its_cameras_are_good() -> None:
    rows = read(SAMPLE)
    assert len(rows) >= 12
    assert len({row["category"] for row in rows}) >= 5
    assert [row["sku"] for row in rows] == [sample.sku for sample in SAMPLES]
    for row in rows:
        cameras = load_cameras(SAMPLE / row["views"] / "cameras.json")
        assert len(cameras) >= 16
        assert min(cameras.size) >= 96
        look_at_sphere(cameras)


def test_normals_are_smooth_over_a_ball_and_sharp_at_a_boxs_edges() -> None:
    ball = trimesh.creation.icosphere(subdivisions=3)
    part = Part.from_mesh(ball, plain(1, 1, 1))
    assert (part.normals * part.vertices).sum(axis=1).min() > 0.99
    box = trimesh.creation.box()
    normals = corner_normals(np.asarray(box.triangles), 0.7).reshape(-1, 3, 3)
    assert np.allclose(normals, np.asarray(box.face_normals)[:, None])
