from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from workloads.reconstruction.cameras import load_cameras, look_at_sphere
from workloads.reconstruction.photos import load_photos
from workloads.reconstruction.prepared import Prepared
from workloads.reconstruction.preprocess import choose_held_out, preprocess
from workloads.reconstruction.segmentation import fit_paper

from airflow_gpu_provider.catalog.product import Product, ProductUnusable
from scripts.catalog_goods import bottle
from scripts.catalog_photos import Shot, photograph

Make = Callable[..., Product]


@pytest.fixture
def spoiled(ball_photos: Path, tmp_path: Path) -> Path:
    """Return a private copy of the ball's photos, to be spoiled by the test."""
    shutil.copytree(ball_photos, tmp_path / "catalog")
    return tmp_path / "catalog"


def edit_cameras(catalog: Path, change: Callable[[dict], None]) -> None:
    path = catalog / "views" / "ball" / "cameras.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_good_photos_give_silhouettes_and_cameras_round_the_unit_sphere(
    ball_photos: Path, make_product: Make
) -> None:
    product = make_product(ball_photos)
    figures = preprocess(product)
    prepared = Prepared.load(product.work_dir)
    assert figures["views"] == 18
    assert figures["held_out_views"] == 3
    assert figures["left_out_views"] == 0
    assert prepared.photos.shape == (18, 96, 96, 3)
    assert np.allclose(prepared.centre, [0, 0.1, 0], atol=0.01)
    # The rig frames the ball with FILL, so in the normalised frame the ball nearly fills the sphere.
    size = (prepared.box[1] - prepared.box[0]) / 2
    assert np.all((size > 0.8) & (size < 1.05))
    for view in prepared.training_views:
        assert np.linalg.norm(prepared.cameras.centres[view]) == pytest.approx(2.8, abs=0.3)


def test_held_out_views_are_spread_and_most_views_train() -> None:
    held_out = choose_held_out(24)
    assert np.flatnonzero(held_out).tolist() == [2, 8, 14, 20]
    assert choose_held_out(16).sum() >= 2


def test_missing_views_folder_is_refused_with_its_name(ball_photos: Path, make_product: Make) -> None:
    with pytest.raises(ProductUnusable, match="views folder 'views/none' does not exist"):
        preprocess(make_product(ball_photos, views="views/none"))


def test_empty_views_column_is_refused(ball_photos: Path, make_product: Make) -> None:
    with pytest.raises(ProductUnusable, match="column views is empty"):
        preprocess(make_product(ball_photos, views=" "))


def test_missing_cameras_are_refused(spoiled: Path, make_product: Make) -> None:
    (spoiled / "views" / "ball" / "cameras.json").unlink()
    with pytest.raises(ProductUnusable, match=r"no cameras\.json in ball/"):
        preprocess(make_product(spoiled))


def test_cameras_that_are_not_json_are_refused(spoiled: Path, make_product: Make) -> None:
    (spoiled / "views" / "ball" / "cameras.json").write_text('{"views": [')
    with pytest.raises(ProductUnusable, match=r"cameras\.json cannot be read as JSON"):
        preprocess(make_product(spoiled))


def test_too_few_views_are_refused_with_the_number_given_and_needed(
    spoiled: Path, make_product: Make
) -> None:
    edit_cameras(spoiled, lambda document: document.update(views=document["views"][:15]))
    with pytest.raises(ProductUnusable, match=r"lists 15 views; at least 16 are needed"):
        preprocess(make_product(spoiled))


def test_camera_without_intrinsics_is_refused(spoiled: Path, make_product: Make) -> None:
    edit_cameras(spoiled, lambda document: document["views"][3].pop("intrinsics"))
    with pytest.raises(ProductUnusable, match=r"not complete \(KeyError: 'intrinsics'\)"):
        preprocess(make_product(spoiled))


def scale_rotation(document: dict) -> None:
    matrix = np.array(document["views"][2]["camera_to_world"])
    matrix[:3, :3] *= 1.1
    document["views"][2]["camera_to_world"] = matrix.tolist()


def mirror(document: dict) -> None:
    matrix = np.array(document["views"][2]["camera_to_world"])
    matrix[:3, 0] *= -1
    document["views"][2]["camera_to_world"] = matrix.tolist()


def not_a_number(document: dict) -> None:
    document["views"][2]["camera_to_world"][0][3] = float("nan")


def negative_focal_length(document: dict) -> None:
    document["views"][2]["intrinsics"]["fx"] = -100


def turn_round(document: dict) -> None:
    """OpenGL axes instead of OpenCV ones: the commonest mistake."""
    for view in document["views"]:
        view["camera_to_world"] = (np.array(view["camera_to_world"]) @ np.diag([1, -1, -1, 1])).tolist()


def one_direction(document: dict) -> None:
    for view in document["views"]:
        view["camera_to_world"] = document["views"][0]["camera_to_world"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scale_rotation, r"rotation of view_02\.png is off by 0\.21"),
        (mirror, r"rotation of view_02\.png.*determinant -1"),
        (not_a_number, r"camera of view_02\.png holds NaN"),
        (negative_focal_length, r"intrinsics of view_02\.png are not usable \(fx -100"),
        (turn_round, r"18 of 18 cameras do not look at the common centre.*OpenCV axes"),
        (one_direction, "all cameras look in the same direction"),
    ],
)
def test_bad_cameras_are_refused(
    change: Callable[[dict], None], reason: str, spoiled: Path, make_product: Make
) -> None:
    edit_cameras(spoiled, change)
    with pytest.raises(ProductUnusable, match=reason):
        preprocess(make_product(spoiled))


def test_cameras_that_contradict_the_photos_are_refused(tmp_path: Path, make_product: Make) -> None:
    """Every matrix stays valid; only the silhouettes can tell."""
    photograph(
        bottle(), tmp_path / "catalog" / "views" / "ball", np.random.default_rng(0), Shot(views=16, size=96)
    )

    def roll(document: dict) -> None:
        # A quarter turn of every camera about its own axis lays the upright bottle down, each time elsewhere.
        quarter = np.array([[0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], dtype=float)
        for view in document["views"]:
            view["camera_to_world"] = (np.array(view["camera_to_world"]) @ quarter).tolist()

    edit_cameras(tmp_path / "catalog", roll)
    with pytest.raises(ProductUnusable, match="contradict each other"):
        preprocess(make_product(tmp_path / "catalog"))


def test_one_outline_found_wrongly_is_left_out_instead_of_spoiling_the_product(
    spoiled: Path, make_product: Make
) -> None:
    path = spoiled / "views" / "ball" / "view_03.png"
    photo = np.asarray(Image.open(path)).copy()
    # Three quarters of the ball take the backdrop's colour, as a grey side before grey paper would.
    paper, noise = fit_paper(photo / 255)
    bare = paper + np.random.default_rng(0).normal(0, 1, paper.shape) * noise
    photo[:, 34:] = (bare[:, 34:] * 255).clip(0, 255)
    Image.fromarray(photo).save(path)
    product = make_product(spoiled)
    figures = preprocess(product)
    prepared = Prepared.load(product.work_dir)
    assert figures["left_out_views"] == 1
    assert np.flatnonzero(prepared.left_out).tolist() == [3]
    assert 3 not in prepared.training_views
    assert np.all((prepared.box[1] - prepared.box[0]) / 2 > 0.8)


def test_unreadable_photo_is_refused_with_its_name(spoiled: Path, make_product: Make) -> None:
    path = spoiled / "views" / "ball" / "view_05.png"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ProductUnusable, match=r"photo view_05\.png in ball/ cannot be read.*save it again"):
        preprocess(make_product(spoiled))


def test_missing_photo_is_refused_with_its_name(spoiled: Path, make_product: Make) -> None:
    (spoiled / "views" / "ball" / "view_07.png").unlink()
    with pytest.raises(ProductUnusable, match=r"photo view_07\.png is listed.*missing"):
        preprocess(make_product(spoiled))


def test_photo_outside_the_views_folder_is_refused(spoiled: Path, make_product: Make) -> None:
    edit_cameras(spoiled, lambda document: document["views"][0].update(file="../../secret.png"))
    with pytest.raises(ProductUnusable, match="lies outside ball/"):
        preprocess(make_product(spoiled))


def test_small_photo_is_refused_with_both_sizes(spoiled: Path, make_product: Make) -> None:
    path = spoiled / "views" / "ball" / "view_01.png"
    Image.open(path).resize((95, 95)).save(path)
    with pytest.raises(ProductUnusable, match=r"view_01\.png has 95x95 pixels; at least 96x96"):
        preprocess(make_product(spoiled))


def test_photo_of_another_size_than_its_camera_is_refused(spoiled: Path, make_product: Make) -> None:
    path = spoiled / "views" / "ball" / "view_01.png"
    Image.open(path).resize((120, 120)).save(path)
    with pytest.raises(ProductUnusable, match=r"120x120 pixels, cameras\.json says 96x96"):
        preprocess(make_product(spoiled))


def test_large_photos_are_shrunk_together_with_their_cameras(spoiled: Path, make_product: Make) -> None:
    folder = spoiled / "views" / "ball"
    original = load_cameras(folder / "cameras.json")
    for name in original.files:
        Image.open(folder / name).resize((384, 384)).save(folder / name)

    def enlarge(document: dict) -> None:
        document.update(width=384, height=384)
        for view in document["views"]:
            view["intrinsics"] = {key: value * 4 for key, value in view["intrinsics"].items()}

    edit_cameras(spoiled, enlarge)
    photos, cameras = load_photos(make_product(spoiled))
    assert photos.shape == (18, 256, 256, 3)
    assert cameras.size == (256, 256)
    expected = original.intrinsics[0] * np.array([[256 / 96], [256 / 96], [1]])
    assert cameras.intrinsics[0] == pytest.approx(expected)


def test_sphere_that_all_cameras_see_is_the_rigs_centre(ball_photos: Path) -> None:
    centre, radius = look_at_sphere(load_cameras(ball_photos / "views" / "ball" / "cameras.json"))
    assert np.allclose(centre, [0, 0.1, 0], atol=0.005)
    assert radius == pytest.approx(0.1 / 0.92, rel=0.02)
