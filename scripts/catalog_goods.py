"""Small goods of the sample shop: mug, bowl, teapot, vase, clock, bottle, sneaker, toy.

Every builder takes nothing and returns a ``Model`` in metres. Invariant: no randomness here; what varies
between runs of the script is the photography alone. Listed for sale in ``catalog_shapes``.
"""

from __future__ import annotations

import numpy as np

from scripts.catalog_model import BRASS, CREAM, Model, Part, Points, banded, plain, wood
from scripts.catalog_solids import (
    box,
    joined,
    loft,
    pillow,
    ring,
    smooth_profile,
    spline,
    tube,
    turned,
    turned_about,
)


def mug() -> Model:
    """Mug: glazed, open, with a handle and a white band."""
    outer = [(0.0, 0.0), (0.036, 0.0), (0.041, 0.006), (0.042, 0.09), (0.0405, 0.093)]
    body = turned([*outer, (0.037, 0.09), (0.036, 0.010), (0.0, 0.008)])
    path = spline(
        [(0.038, 0.076, 0), (0.062, 0.074, 0), (0.072, 0.048, 0), (0.058, 0.022, 0), (0.038, 0.020, 0)]
    )
    red, white = plain(0.82, 0.25, 0.20), plain(0.96, 0.94, 0.90)

    def band(points: Points) -> Points:
        outside = np.hypot(points[:, 0], points[:, 2]) > 0.039
        return np.where(outside, np.abs(points[:, 1] - 0.050) - 0.013, -1.0)

    return Model(
        [
            Part.from_mesh(body, banded(red, white, band), gloss=0.5),
            Part.from_mesh(tube(path, 0.0068), red, gloss=0.5),
        ]
    )


def bowl() -> Model:
    """Salad bowl: blue outside with a zigzag, cream inside."""
    outer = smooth_profile([(0.05, 0.0), (0.085, 0.025), (0.125, 0.075), (0.14, 0.115)], 24)
    inner = smooth_profile([(0.131, 0.115), (0.115, 0.076), (0.075, 0.032), (0.0, 0.016)], 24)

    def inside(points: Points) -> Points:
        radius = np.hypot(points[:, 0], points[:, 2])
        return np.interp(points[:, 1], [0.0, 0.025, 0.075, 0.115], [0.046, 0.080, 0.120, 0.1355]) - radius

    def zigzag(points: Points) -> Points:
        wave = 0.012 * np.abs(((np.arctan2(points[:, 2], points[:, 0]) / np.pi * 7) % 2) - 1)
        return 0.009 - np.abs(points[:, 1] - 0.066 - wave)

    outside = banded(plain(0.95, 0.90, 0.78), plain(0.14, 0.30, 0.55), zigzag)
    return Model(
        [Part.from_mesh(turned([(0.0, 0.0), *outer, *inner]), banded(CREAM, outside, inside), gloss=0.35)]
    )


def teapot() -> Model:
    """Teapot: round body, spout, handle, lid with a knob."""
    body = turned(
        smooth_profile(
            [(0.0, 0.0), (0.055, 0.002), (0.088, 0.05), (0.075, 0.10), (0.04, 0.125), (0.0, 0.13)], 40
        )
    )
    spout = tube(
        spline([(0.07, 0.045, 0), (0.105, 0.06, 0), (0.122, 0.09, 0), (0.146, 0.117, 0)], 24),
        (0.021, 0.015, 0.011),
    )
    handle = tube(
        spline(
            [
                (-0.068, 0.095, 0),
                (-0.108, 0.108, 0),
                (-0.132, 0.075, 0),
                (-0.112, 0.040, 0),
                (-0.078, 0.032, 0),
            ]
        ),
        0.0085,
    )
    knob = turned(smooth_profile([(0.0, 0.122), (0.010, 0.130), (0.015, 0.146), (0.0, 0.158)], 24))
    teal, gold = plain(0.20, 0.52, 0.55), plain(0.88, 0.72, 0.34)
    stripe = banded(CREAM, teal, lambda p: 0.010 - np.abs(p[:, 1] - 0.066))
    return Model(
        [
            Part.from_mesh(body, stripe, gloss=0.6),
            Part.from_mesh(joined(spout, handle), teal, gloss=0.6),
            Part.from_mesh(knob, gold, gloss=0.6),
        ]
    )


def vase() -> Model:
    """Vase: slim neck, three glazes."""
    outer = smooth_profile(
        [(0.045, 0.0), (0.075, 0.06), (0.085, 0.13), (0.05, 0.22), (0.030, 0.27), (0.048, 0.32)], 40
    )
    inner = [(0.040, 0.319), (0.024, 0.27), (0.0, 0.26)]
    glaze = banded(
        plain(0.90, 0.56, 0.30),
        plain(0.36, 0.22, 0.36),
        lambda p: p[:, 1] - 0.115 - 0.012 * np.sin(6 * np.arctan2(p[:, 2], p[:, 0])),
    )
    rim = banded(plain(0.96, 0.84, 0.58), glaze, lambda p: p[:, 1] - 0.235)
    return Model([Part.from_mesh(turned([(0.0, 0.0), *outer, *inner]), rim, gloss=0.5)])


def mantel_clock() -> Model:
    """Mantel clock: arched case, dial with twelve marks and two hands."""
    arch = np.linspace(0, np.pi, 33)
    outline = [(-0.12, 0.03), *[(-0.12 * np.cos(a), 0.16 + 0.12 * np.sin(a)) for a in arch], (0.12, 0.03)]
    case = loft(np.array([[(x, y, z) for x, y in outline] for z in (-0.045, 0.045)]))
    foot = box(0.29, 0.03, 0.115, (0, 0, 0))
    dial = turned([(0.0, 0.0), (0.086, 0.0), (0.086, 0.004), (0.0, 0.004)])
    dial = turned_about(dial, 90, (1, 0, 0), (0, 0, 0))
    dial.apply_translation((0, 0.165, 0.045))
    bezel = turned_about(ring(0.088, 0.008, (0, 0, 0)), 90, (1, 0, 0), (0, 0, 0))
    bezel.apply_translation((0, 0.165, 0.047))
    return Model(
        [
            Part.from_mesh(joined(case, foot), wood(0.45, 0.22, 0.13, axis=0, scale=90), gloss=0.3),
            Part.from_mesh(dial, banded(plain(0.10, 0.10, 0.12), CREAM, _clock_marks)),
            Part.from_mesh(bezel, BRASS, gloss=0.8),
        ]
    )


def _clock_marks(points: Points) -> Points:
    """Return positive values on the marks and hands of the mantel clock's dial."""
    x, y = points[:, 0], points[:, 1] - 0.165
    radius, angle = np.hypot(x, y), np.arctan2(x, y)
    nearest = np.abs((angle / (np.pi / 6) + 0.5) % 1 - 0.5) * (np.pi / 6) * radius
    mark = (radius > 0.062) & (radius < 0.078) & (nearest < 0.0045)
    hands = np.zeros(len(points), dtype=bool)
    for at, length, width in ((np.radians(-58), 0.045, 0.0055), (np.radians(52), 0.062, 0.0045)):
        along, across = x * np.sin(at) + y * np.cos(at), x * np.cos(at) - y * np.sin(at)
        hands |= (along > -0.006) & (along < length) & (np.abs(across) < width)
    return np.where(mark | hands, 1.0, -1.0)


def bottle() -> Model:
    """Bottle: green glass, paper label, cork."""
    shoulder = smooth_profile(
        [(0.038, 0.15), (0.034, 0.178), (0.022, 0.198), (0.0155, 0.225), (0.0145, 0.28)], 30
    )
    glass = turned([(0.0, 0.0), (0.036, 0.0), (0.038, 0.004), *shoulder, (0.0, 0.28)])
    label = banded(plain(0.72, 0.16, 0.16), CREAM, lambda p: 0.014 - np.abs(p[:, 1] - 0.105))
    coat = banded(label, plain(0.10, 0.33, 0.20), lambda p: 0.045 - np.abs(p[:, 1] - 0.088))
    cork = turned([(0.0, 0.275), (0.0145, 0.275), (0.0155, 0.31), (0.0, 0.312)])
    return Model([Part.from_mesh(glass, coat, gloss=0.7), Part.from_mesh(cork, plain(0.78, 0.58, 0.38))])


def shoe() -> Model:
    """Sneaker: sole, upper lofted along the foot, open collar."""
    stations = np.linspace(0, 1, 40)
    halves = np.interp(
        stations, [0, 0.06, 0.25, 0.5, 0.75, 0.93, 1.0], [0.012, 0.030, 0.036, 0.034, 0.045, 0.032, 0.010]
    )
    heights = np.interp(
        stations, [0, 0.05, 0.30, 0.45, 0.70, 0.92, 1.0], [0.070, 0.104, 0.100, 0.088, 0.062, 0.048, 0.030]
    )
    sole = loft(_sections(stations, halves * 1.10 + 0.003, np.full(40, 0.026), 0.0, 0.25))
    upper = loft(_sections(stations, halves, heights, 0.018, 0.75))
    collar = turned_about(
        pillow(0.105, 0.03, 0.054, (-0.078, 0.082, 0), roundness=0.8), -6, (0, 0, 1), (-0.08, 0.1, 0)
    )
    laces = [
        box(0.007, 0.006, 0.046, (x, y, 0))
        for x, y in ((0.0, 0.084), (0.018, 0.078), (0.036, 0.071), (0.054, 0.064))
    ]

    def stripe(points: Points) -> Points:
        return np.where(
            np.abs(points[:, 2]) > 0.02, 0.012 - np.abs(points[:, 0] + points[:, 1] * 0.6 - 0.025), -1
        )

    return Model(
        [
            Part.from_mesh(sole, plain(0.95, 0.95, 0.93)),
            Part.from_mesh(upper, banded(plain(0.98, 0.80, 0.25), plain(0.20, 0.34, 0.66), stripe)),
            Part.from_mesh(collar, plain(0.10, 0.11, 0.15)),
            Part.from_mesh(joined(*laces), plain(0.97, 0.97, 0.97)),
        ]
    )


def _sections(along: Points, half: Points, top: Points, bottom: float, power: float) -> Points:
    """Return half-superellipse cross sections along x for a shoe of 0.28 m."""
    angle = np.linspace(0, np.pi, 25)
    across, up = np.sign(np.cos(angle)) * np.abs(np.cos(angle)) ** power, np.sin(angle) ** power
    return np.array(
        [
            [
                ((position - 0.5) * 0.28, bottom + v * (height - bottom), w * width)
                for w, v in zip(across, up, strict=True)
            ]
            for position, width, height in zip(along, half, top, strict=True)
        ]
    )


def ring_stacker() -> Model:
    """Toy: coloured rings on a peg."""
    parts = [
        Part.from_mesh(
            turned([(0.0, 0.0), (0.075, 0.0), (0.075, 0.015), (0.0, 0.017)]), wood(0.85, 0.68, 0.45)
        ),
        Part.from_mesh(
            turned(smooth_profile([(0.0, 0.165), (0.017, 0.172), (0.019, 0.190), (0.0, 0.206)], 24)),
            plain(0.90, 0.30, 0.25),
        ),
        Part.from_mesh(tube(np.array([[0, 0.01, 0], [0, 0.18, 0]]), 0.012), wood(0.85, 0.68, 0.45, axis=1)),
    ]
    colours = ((0.26, 0.42, 0.75), (0.22, 0.62, 0.42), (0.95, 0.76, 0.22), (0.92, 0.50, 0.20))
    for index, colour in enumerate(colours):
        radius = 0.052 - index * 0.0075
        parts.append(
            Part.from_mesh(ring(radius, 0.0195, (0, 0.034 + index * 0.0365, 0)), plain(*colour), gloss=0.4)
        )
    return Model(parts)
