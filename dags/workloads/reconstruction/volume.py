"""Render rays through a field, keeping only the samples that can matter.

Most samples of a ray lie in air or deep inside the product. They are dropped before the field is asked, so
a step costs what the surface costs and not what the box costs.

Invariant: dropping changes no pixel noticeably: air absorbs nothing, and what lies behind an opaque surface
is not seen. Used by ``train``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workloads.reconstruction.field import Field

#: Distance between samples, in voxels: two samples at least in the thinnest part a grid can hold.
STEP = 0.8

#: Samples farther outside than this, in voxels, are air; wide enough for the surface to move back outwards.
AIR_BAND = 2.5

#: Samples are dropped after this many of a ray's samples deeper inside than ``DEEP`` voxels.
DEEP = 2.0
DEEP_SAMPLES = 2


@dataclass(frozen=True)
class Rays:
    """Some pixels of training photos: where they look and what they saw."""

    origins: Tensor
    directions: Tensor
    #: distances at which the ray enters and leaves the box
    near: Tensor
    far: Tensor
    photo: Tensor
    paper: Tensor
    coverage: Tensor

    def __len__(self) -> int:
        return len(self.near)

    def pick(self, index: Tensor) -> Rays:
        """Return some of the rays."""
        return Rays(
            *(
                values[index]
                for values in (
                    self.origins,
                    self.directions,
                    self.near,
                    self.far,
                    self.photo,
                    self.paper,
                    self.coverage,
                )
            )
        )


def render(field: Field, rays: Rays, sharpness: float, jitter: Tensor) -> tuple[Tensor, Tensor]:
    """Return the colour over the backdrop (n, 3) and the opacity (n,) of rays.

    ``jitter`` (n,) in 0..1 shifts each ray's samples, so that no plane of the grid is favoured.
    """
    points, kept = _samples(field, rays, jitter)
    distance, colour = field.sample(points[kept])
    # Samples of a ray become a row again, padded with air; rows are as long as the busiest ray needs.
    counts = kept.sum(dim=1)
    width = int(counts.max()) + 1 if len(counts) else 1
    row = torch.arange(len(rays), device=points.device).repeat_interleave(counts)
    first = counts.cumsum(dim=0) - counts
    column = torch.arange(len(row), device=points.device) - first[row]
    slot = row * width + column
    outside = distance.new_full((len(rays) * width,), AIR_BAND * 4)
    values = outside.index_copy(0, slot, distance).view(len(rays), width)
    # Air first: a ray enters the product from outside.
    clear = torch.nn.functional.logsigmoid(sharpness * values)
    before = torch.cat([torch.zeros_like(clear[:, :1]), clear[:, :-1]], dim=1)
    absorbed = 1 - torch.exp((clear - before).clamp(max=0))
    through = torch.cumprod(1 - absorbed[:, :-1] + 1e-7, dim=1)
    weights = absorbed * torch.cat([torch.ones_like(through[:, :1]), through], dim=1)
    opacity = weights.sum(dim=1)
    seen = torch.zeros_like(rays.photo).index_add(0, row, weights.view(-1)[slot, None] * colour)
    return seen + (1 - opacity)[:, None] * rays.paper, opacity


@torch.no_grad()
def _samples(field: Field, rays: Rays, jitter: Tensor) -> tuple[Tensor, Tensor]:
    """Return candidate points (n, samples, 3) and which of them to evaluate (n, samples)."""
    step = STEP * field.lattice.grid.voxel
    longest = float((rays.far - rays.near).max())
    count = max(2, int(longest / step) + 2)
    along = rays.near[:, None] + (torch.arange(count, device=jitter.device) - 1 + jitter[:, None]) * step
    points = rays.origins[:, None] + along[..., None] * rays.directions[:, None]
    guess = field.distance.detach()[field.lattice.nearest(points.view(-1, 3)), 0].view(along.shape)
    deep_before = (guess < -DEEP).cumsum(dim=1)
    inside_box = (along >= rays.near[:, None]) & (along <= rays.far[:, None])
    return points, (guess < AIR_BAND) & (deep_before <= DEEP_SAMPLES) & inside_box
