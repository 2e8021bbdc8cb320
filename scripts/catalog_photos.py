"""Photograph a model: a ring of cameras, a studio's light, a backdrop that is not perfect, a noisy sensor.

Writes ``view_00.png`` ... and ``cameras.json`` into one folder. The light stands still in the world while the
camera moves, so a photo holds shading, shadow and highlights, and a reconstruction has to cope with them.

Invariant: everything random comes from the generator passed in, so a seed names the photos to the byte.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter
from workloads.reconstruction.raster import Fragments, inverse, project, rasterise

from scripts.catalog_model import Model, Points

#: Each pixel is the mean of this many samples in each direction.
SAMPLES = 3

#: Distance of the camera in bounding radii: near enough for perspective, far enough not to distort.
DISTANCE = 3.0

#: Share of the half image that the bounding sphere fills.
FILL = 0.92

#: (elevation in degrees, share of the views): mostly sidewise, some from above to see into things.
RINGS = ((12.0, 0.42), (34.0, 0.33), (60.0, 0.25))

KEY_LIGHT = np.array([0.48, 0.72, 0.50]) / np.linalg.norm([0.48, 0.72, 0.50])
FILL_LIGHT = np.array([-0.70, 0.30, -0.45]) / np.linalg.norm([-0.70, 0.30, -0.45])

#: Backdrops a studio has; one that differs well from the product is taken.
BACKDROPS = (
    (0.78, 0.80, 0.83),
    (0.55, 0.66, 0.74),
    (0.62, 0.70, 0.60),
    (0.80, 0.74, 0.66),
    (0.36, 0.40, 0.46),
    (0.70, 0.62, 0.68),
)


@dataclass(frozen=True)
class Shot:
    """How a product is photographed."""

    views: int = 24
    size: int = 104
    #: standard deviation of the sensor's read noise, in grey levels of 255
    noise: float = 1.3


@dataclass(frozen=True)
class _Scene:
    """The model's triangles in one list, and the shadow map of the key light."""

    vertices: Points
    faces: NDArray[np.int64]
    normals: Points
    uv: Points
    part: NDArray[np.int64]
    shadow_intrinsics: Points
    shadow_camera: Points
    shadow_depth: Points
    radius: float


def photograph(model: Model, folder: Path, random: np.random.Generator, shot: Shot) -> None:
    """Write the photos of ``model`` and their ``cameras.json`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    centre, radius = model.bounding_sphere()
    scene = _scene(model, centre, radius)
    intrinsics = _pinhole(shot.size)
    poses = _poses(centre, radius, random, shot.views)
    backdrop = _backdrop(model, scene, intrinsics, poses[len(poses) // 2], shot, random)
    views = []
    for index, pose in enumerate(poses):
        colour, alpha = render(model, scene, intrinsics, pose, shot.size)
        photo = colour + (1 - alpha[..., None]) * _paper(backdrop, random, shot.size)
        name = f"view_{index:02d}.png"
        Image.fromarray(_expose(photo, random, shot.noise)).save(folder / name, optimize=True)
        lens = {
            "fx": intrinsics[0, 0],
            "fy": intrinsics[1, 1],
            "cx": intrinsics[0, 2],
            "cy": intrinsics[1, 2],
        }
        views.append(
            {
                "file": name,
                "intrinsics": {key: round(float(value), 6) for key, value in lens.items()},
                "camera_to_world": [[round(float(value), 7) for value in row] for row in pose],
            }
        )
    document = {
        "format": "turntable-1",
        "about": "camera_to_world: 4x4, OpenCV axes (x right, y down, z forward), world y-up in metres; "
        "intrinsics in pixels, the centre of the first pixel is (0.5, 0.5)",
        "width": shot.size,
        "height": shot.size,
        "views": views,
    }
    (folder / "cameras.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def render(model: Model, scene: _Scene, intrinsics: Points, pose: Points, size: int) -> tuple[Points, Points]:
    """Return colour times coverage (size, size, 3) and coverage (size, size), linear in grey levels 0..1."""
    fine = intrinsics.copy()
    fine[:2] *= SAMPLES
    fragments = rasterise(scene.vertices, scene.faces, fine, inverse(pose), (size * SAMPLES, size * SAMPLES))
    image = np.zeros((size * SAMPLES, size * SAMPLES, 3))
    image[fragments.covered] = _shade(model, scene, fragments, pose[:3, 3])
    blocks = (size, SAMPLES, size, SAMPLES)
    colour = image.reshape(*blocks, 3).mean(axis=(1, 3))
    return colour, fragments.covered.reshape(blocks).mean(axis=(1, 3))


def true_silhouettes(model: Model, intrinsics: Points, poses: Points, size: int) -> Points:
    """Return the exact coverage (n, size, size) of each view: what a perfect segmentation would find."""
    scene = _scene(model, *model.bounding_sphere())
    return np.stack([render(model, scene, intrinsics, pose, size)[1] for pose in poses])


def _scene(model: Model, centre: Points, radius: float) -> _Scene:
    offsets = np.cumsum([0, *(len(part.vertices) for part in model.parts)])
    vertices = np.concatenate([part.vertices for part in model.parts])
    faces = np.concatenate([part.faces + offset for part, offset in zip(model.parts, offsets, strict=False)])
    lamp = centre + KEY_LIGHT * radius * 8
    resolution = 384
    shadow_intrinsics = np.array(
        [[resolution * 3.6, 0, resolution / 2], [0, resolution * 3.6, resolution / 2], [0, 0, 1]]
    )
    shadow_camera = inverse(_look_at(lamp, centre))
    shadow = rasterise(vertices, faces, shadow_intrinsics, shadow_camera, (resolution, resolution))
    return _Scene(
        vertices=vertices,
        faces=faces,
        normals=np.concatenate([part.normals for part in model.parts]),
        uv=np.concatenate([part.uv for part in model.parts]),
        part=np.repeat(np.arange(len(model.parts)), [len(part.faces) for part in model.parts]),
        shadow_intrinsics=shadow_intrinsics,
        shadow_camera=shadow_camera,
        shadow_depth=shadow.depth,
        radius=radius,
    )


def _shade(model: Model, scene: _Scene, fragments: Fragments, eye: Points) -> Points:
    """Return the colours of the covered pixels."""
    face = fragments.face[fragments.covered]
    weights = fragments.weights[fragments.covered][:, :, None]
    corners = scene.faces[face]
    points, normals, uv = (
        (values[corners] * weights).sum(axis=1) for values in (scene.vertices, scene.normals, scene.uv)
    )
    normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-9)
    to_eye = eye - points
    to_eye /= np.linalg.norm(to_eye, axis=1, keepdims=True)
    normals *= np.where((normals * to_eye).sum(axis=1, keepdims=True) < 0, -1.0, 1.0)
    base, gloss = np.zeros_like(points), np.zeros(len(points))
    for index in np.unique(scene.part[face]):
        mine = scene.part[face] == index
        base[mine] = model.parts[index].paint(points[mine], uv[mine])
        gloss[mine] = model.parts[index].gloss
    lit = _lit(scene, points, normals)
    key = np.clip(normals @ KEY_LIGHT, 0, None) * lit
    sky = 0.5 + 0.5 * normals[:, 1]
    light = 0.34 + 0.22 * sky + 0.52 * key + 0.16 * np.clip(normals @ FILL_LIGHT, 0, None)
    half = KEY_LIGHT + to_eye
    half /= np.linalg.norm(half, axis=1, keepdims=True)
    shine = gloss * lit * np.clip((normals * half).sum(axis=1), 0, None) ** 40
    return np.clip(base * light[:, None] + 0.55 * shine[:, None], 0, 1)


def _lit(scene: _Scene, points: Points, normals: Points) -> Points:
    """Return how much of the key light reaches the points, softened over a few shadow-map texels."""
    lifted = points + normals * scene.radius * 0.012
    pixels, depth = project(lifted, scene.shadow_intrinsics, scene.shadow_camera)
    limit = scene.shadow_depth.shape[0] - 1
    total = np.zeros(len(points))
    offsets = [(x, y) for x in (-3, 0, 3) for y in (-3, 0, 3)]
    for x, y in offsets:
        column = np.clip(pixels[:, 0].astype(int) + x, 0, limit)
        row = np.clip(pixels[:, 1].astype(int) + y, 0, limit)
        total += depth <= scene.shadow_depth[row, column] + scene.radius * 0.02
    return total / len(offsets)


def _poses(centre: Points, radius: float, random: np.random.Generator, views: int) -> Points:
    """Return camera-to-world matrices on rings round the product; a hand-set rig, so not quite regular."""
    counts = [round(share * views) for _, share in RINGS]
    counts[0] += views - sum(counts)
    poses = []
    for ring, ((elevation, _), count) in enumerate(zip(RINGS, counts, strict=True)):
        for step in range(count):
            angle = 2 * np.pi * (step + ring / 3) / count + random.normal(0, 0.03)
            height = np.radians(elevation + random.normal(0, 1.0))
            direction = np.array(
                [np.cos(height) * np.sin(angle), np.sin(height), np.cos(height) * np.cos(angle)]
            )
            aim = centre + random.normal(0, 0.01, 3) * radius
            poses.append(_look_at(centre + direction * radius * DISTANCE, aim))
    return np.stack(poses)


def _look_at(eye: Points, target: Points) -> Points:
    forward = (target - eye) / np.linalg.norm(target - eye)
    right = np.cross(forward, [0.0, 1.0, 0.0])
    right /= np.linalg.norm(right)
    pose = np.eye(4)
    pose[:3, 0], pose[:3, 1], pose[:3, 2], pose[:3, 3] = right, np.cross(forward, right), forward, eye
    return pose


def _pinhole(size: int) -> Points:
    focal = FILL * size / 2 / np.tan(np.arcsin(1 / DISTANCE))
    return np.array([[focal, 0, size / 2], [0, focal, size / 2], [0, 0, 1.0]])


def _backdrop(
    model: Model,
    scene: _Scene,
    intrinsics: Points,
    pose: Points,
    shot: Shot,
    random: np.random.Generator,
) -> Points:
    """Choose, as a photographer would, a paper from which the product stands out."""
    colour, alpha = render(model, scene, intrinsics, pose, shot.size)
    seen = colour[alpha > 0.99]
    papers = np.array(BACKDROPS)
    distance = np.linalg.norm(seen[:, None] - papers[None], axis=2)
    contrast = np.percentile(distance, 4, axis=0)
    good = np.flatnonzero(contrast >= 0.7 * contrast.max())
    return np.asarray(papers[random.choice(good)])


def _paper(colour: Points, random: np.random.Generator, size: int) -> Points:
    """Return one photo's background: fall-off of the lamp, stains, a little colour cast."""
    rows, columns = np.mgrid[0:size, 0:size] / (size - 1) - 0.5
    tilt = random.normal(0, 0.05, 2)
    light = 1 + tilt[0] * columns + tilt[1] * rows - random.uniform(0.05, 0.16) * (rows**2 + columns**2)
    stains = gaussian_filter(random.normal(0, 1, (size, size)), size / 9)
    light += 0.008 * stains / max(float(np.abs(stains).std()), 1e-9)
    return np.asarray((colour + random.normal(0, 0.006, 3)) * light[..., None])


def _expose(photo: Points, random: np.random.Generator, noise: float) -> NDArray[np.uint8]:
    """Return 8-bit pixels with exposure drift, shot noise that grows with brightness, and read noise."""
    photo = photo * (1 + random.normal(0, 0.008)) * 255
    deviation = np.sqrt(noise**2 + 0.010 * np.clip(photo, 0, None))
    return np.clip(np.round(photo + random.normal(0, 1, photo.shape) * deviation), 0, 255).astype(np.uint8)
