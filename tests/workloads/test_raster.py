from __future__ import annotations

import numpy as np
import pytest
import trimesh
from workloads.reconstruction.raster import project, rasterise

IDENTITY = np.eye(4)


def pinhole(focal: float, side: int) -> np.ndarray:
    return np.array([[focal, 0, side / 2], [0, focal, side / 2], [0, 0, 1.0]])


def test_sphere_silhouette_has_the_area_and_outline_that_geometry_says() -> None:
    side, focal, distance, radius = 200, 300.0, 4.0, 1.0
    mesh = trimesh.creation.icosphere(subdivisions=5, radius=radius)
    vertices = np.add(mesh.vertices, (0, 0, distance))
    seen = rasterise(vertices, np.asarray(mesh.faces), pinhole(focal, side), IDENTITY, (side, side))
    # A sphere on the optical axis projects to a circle of focal * tan(asin(radius / distance)).
    expected = focal * np.tan(np.arcsin(radius / distance))
    rows, columns = np.mgrid[0:side, 0:side] + 0.5
    circle = np.hypot(rows - side / 2, columns - side / 2) <= expected
    assert (seen.covered ^ circle).sum() <= 0.004 * circle.sum()
    assert np.sqrt(seen.covered.sum() / np.pi) == pytest.approx(expected, rel=0.002)


def test_depth_of_a_sphere_is_that_of_its_front() -> None:
    mesh = trimesh.creation.icosphere(subdivisions=5, radius=1.0)
    vertices = np.add(mesh.vertices, (0, 0, 4.0))
    seen = rasterise(vertices, np.asarray(mesh.faces), pinhole(100, 101), IDENTITY, (101, 101))
    assert seen.depth[50, 50] == pytest.approx(3.0, abs=0.002)
    assert np.isinf(seen.depth[0, 0])


def test_the_nearer_of_two_faces_wins_whatever_their_order_and_winding() -> None:
    square = np.array([[-1, -1, 0], [1, -1, 0], [1, 1, 0], [-1, 1, 0]], dtype=float)
    vertices = np.concatenate([np.add(square, (0, 0, 3)), np.add(square * 0.5, (0, 0, 2))])
    near, far = [[4, 6, 5], [4, 7, 6]], [[0, 1, 2], [0, 2, 3]]
    for faces, expected in ((near + far, (0, 1)), (far + near, (2, 3))):
        seen = rasterise(vertices, np.array(faces), pinhole(60, 80), IDENTITY, (80, 80))
        assert seen.face[40, 42] in expected


def test_weights_rebuild_the_point_that_a_pixel_sees_in_perspective() -> None:
    triangle = np.array([[-1, -1, 2.0], [2, -1, 6.0], [-1, 2, 3.0]])
    intrinsics = pinhole(50, 64)
    seen = rasterise(triangle, np.array([[0, 1, 2]]), intrinsics, IDENTITY, (64, 64))
    rows, columns = np.nonzero(seen.covered)
    assert len(rows) > 100
    points = seen.weights[rows, columns] @ triangle
    pixels, depth = project(points, intrinsics, IDENTITY)
    assert np.allclose(pixels, np.stack([columns + 0.5, rows + 0.5], axis=1), atol=1e-6)
    assert np.allclose(depth, seen.depth[rows, columns])


def test_faces_behind_the_camera_and_outside_the_image_are_not_drawn() -> None:
    triangle = np.array([[-1, -1, 3.0], [1, -1, 3.0], [0, 1, 3.0]])
    for shift in ([0, 0, -6], [50, 0, 0], [-50, 20, 0]):
        seen = rasterise(triangle + shift, np.array([[0, 1, 2]]), pinhole(50, 64), IDENTITY, (64, 64))
        assert not seen.covered.any()


def test_blocks_give_the_same_picture_as_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = trimesh.creation.box((1, 1, 1))
    vertices = np.asarray(mesh.vertices) @ trimesh.transformations.euler_matrix(0.4, 0.7, 0.2)[:3, :3].T + [
        0,
        0,
        3,
    ]
    whole = rasterise(vertices, np.asarray(mesh.faces), pinhole(60, 64), IDENTITY, (64, 64))
    monkeypatch.setattr("workloads.reconstruction.raster.CANDIDATES_PER_BLOCK", 500)
    blocks = rasterise(vertices, np.asarray(mesh.faces), pinhole(60, 64), IDENTITY, (64, 64))
    assert np.array_equal(whole.face, blocks.face)
    assert np.array_equal(whole.depth, blocks.depth)
