"""Furniture of the sample shop: chair, stool, coffee table, bookshelf, sofa, table lamp.

Every builder takes nothing and returns a ``Model`` in metres. Invariant: no randomness here; what varies
between runs of the script is the photography alone. Listed for sale in ``catalog_shapes``.
"""

from __future__ import annotations

import numpy as np

from scripts.catalog_model import BRASS, CREAM, OAK, WALNUT, Model, Part, banded, plain, wood
from scripts.catalog_solids import box, joined, pillow, ring, smooth_profile, tube, turned, turned_about


def chair() -> Model:
    """Dining chair: four legs, upholstered seat, back of three slats."""
    legs = [box(0.055, 0.45, 0.055, (x, 0, z)) for x in (-0.19, 0.19) for z in (-0.18, 0.18)]
    posts = [box(0.05, 0.47, 0.045, (x, 0.45, -0.185)) for x in (-0.19, 0.19)]
    slats = [box(0.34, 0.07, 0.03, (0, y, -0.185)) for y in (0.57, 0.69, 0.83)]
    seat = pillow(0.46, 0.075, 0.44, (0, 0.43, 0), roundness=0.35)
    return Model(
        [Part.from_mesh(joined(*legs, *posts, *slats), OAK), Part.from_mesh(seat, plain(0.16, 0.42, 0.44))]
    )


def stool() -> Model:
    """Bar stool: round seat, splayed legs, foot ring."""
    seat = turned(smooth_profile([(0.0, 0.64), (0.14, 0.64), (0.175, 0.665), (0.14, 0.70), (0.0, 0.695)], 40))
    legs = [
        tube(
            np.array([[0.11 * np.cos(a), 0.66, 0.11 * np.sin(a)], [0.21 * np.cos(a), 0.0, 0.21 * np.sin(a)]]),
            0.021,
        )
        for a in np.radians([45, 135, 225, 315])
    ]
    return Model(
        [
            Part.from_mesh(seat, plain(0.80, 0.22, 0.18), gloss=0.3),
            Part.from_mesh(joined(*legs), wood(0.85, 0.66, 0.42, axis=1)),
            Part.from_mesh(ring(0.172, 0.014, (0, 0.25, 0)), plain(0.25, 0.26, 0.28), gloss=0.6),
        ]
    )


def coffee_table() -> Model:
    """Coffee table: round top, shelf below, four legs."""
    top = turned([(0.0, 0.39), (0.44, 0.39), (0.45, 0.40), (0.45, 0.43), (0.44, 0.44), (0.0, 0.44)])
    shelf = turned([(0.0, 0.14), (0.31, 0.14), (0.31, 0.17), (0.0, 0.17)])
    legs = [
        tube(np.array([[x, 0.40, z], [x * 1.12, 0.0, z * 1.12]]), (0.032, 0.024))
        for x in (-0.25, 0.25)
        for z in (-0.25, 0.25)
    ]
    return Model(
        [
            Part.from_mesh(top, WALNUT, gloss=0.25),
            Part.from_mesh(shelf, wood(0.86, 0.72, 0.50, axis=0)),
            Part.from_mesh(joined(*legs), plain(0.14, 0.14, 0.16), gloss=0.4),
        ]
    )


def bookshelf() -> Model:
    """Bookshelf: open case with books and a pot."""
    sides = [box(0.03, 0.90, 0.26, (x, 0, 0)) for x in (-0.32, 0.32)]
    boards = [box(0.64, 0.03, 0.26, (0, y, 0)) for y in (0.03, 0.31, 0.59, 0.87)]
    case = joined(*sides, *boards, box(0.64, 0.88, 0.016, (0, 0.01, -0.122)))
    parts = [Part.from_mesh(case, wood(0.90, 0.82, 0.68, axis=0, scale=30))]
    colours = [
        (0.75, 0.20, 0.18),
        (0.15, 0.33, 0.55),
        (0.90, 0.70, 0.20),
        (0.20, 0.48, 0.32),
        (0.55, 0.25, 0.45),
    ]
    for index, (x, height) in enumerate(
        ((-0.27, 0.22), (-0.21, 0.19), (-0.15, 0.23), (-0.09, 0.20), (-0.03, 0.21))
    ):
        parts.append(Part.from_mesh(box(0.052, height, 0.17, (x, 0.62, -0.01)), plain(*colours[index])))
    for index, (x, height) in enumerate(((0.26, 0.21), (0.20, 0.23), (0.14, 0.20))):
        parts.append(
            Part.from_mesh(box(0.052, height, 0.17, (x, 0.34, -0.01)), plain(*colours[(index * 2 + 1) % 5]))
        )
    parts.append(
        Part.from_mesh(pillow(0.20, 0.18, 0.17, (-0.14, 0.06, 0), roundness=0.5), plain(0.30, 0.55, 0.60))
    )
    return Model(parts)


def sofa() -> Model:
    """Two-seat sofa: base, arms, cushions, a yellow pillow."""
    green, dark = plain(0.24, 0.45, 0.38), plain(0.20, 0.39, 0.33)
    base = pillow(1.62, 0.26, 0.80, (0, 0.12, 0), roundness=0.18)
    back = pillow(1.62, 0.58, 0.24, (0, 0.22, -0.31), roundness=0.28)
    arms = [pillow(0.22, 0.46, 0.82, (x, 0.12, 0), roundness=0.30) for x in (-0.74, 0.74)]
    seats = [pillow(0.62, 0.17, 0.60, (x, 0.35, 0.10), roundness=0.33) for x in (-0.31, 0.31)]
    legs = [box(0.07, 0.14, 0.07, (x, 0, z)) for x in (-0.70, 0.70) for z in (-0.30, 0.30)]
    throw = turned_about(
        pillow(0.40, 0.38, 0.15, (-0.38, 0.50, -0.08), roundness=0.45), -16, (1, 0, 0), (0, 0.5, -0.1)
    )
    return Model(
        [
            Part.from_mesh(joined(base, back, *arms), dark),
            Part.from_mesh(joined(*seats), green),
            Part.from_mesh(joined(*legs), OAK),
            Part.from_mesh(throw, plain(0.92, 0.72, 0.22)),
        ]
    )


def table_lamp() -> Model:
    """Table lamp: brass foot and stem, drum shade."""
    foot = turned(
        [(0.0, 0.0), (0.105, 0.0), (0.105, 0.015), (0.03, 0.04), (0.016, 0.06), (0.016, 0.30), (0.0, 0.30)]
    )
    ball = turned(smooth_profile([(0.0, 0.055), (0.062, 0.12), (0.0, 0.185)], 30))
    shade = turned([(0.0, 0.27), (0.155, 0.265), (0.16, 0.27), (0.105, 0.46), (0.0, 0.46)])
    return Model(
        [
            Part.from_mesh(foot, BRASS, gloss=0.7),
            Part.from_mesh(ball, plain(0.16, 0.38, 0.55), gloss=0.8),
            Part.from_mesh(
                shade, banded(CREAM, plain(0.82, 0.45, 0.34), lambda p: (p[:, 1] - 0.292) * (0.442 - p[:, 1]))
            ),
        ]
    )
