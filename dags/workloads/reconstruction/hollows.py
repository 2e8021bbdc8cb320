"""Find hollows that no silhouette shows: the inside of a mug, of a bowl, between shelves.

The visual hull closes them with a lid, and an opaque surface that starts as that lid moves too little to open
them. So the product is first optimised as coloured fog, where every place can become clear on its own: behind
the lid, colours agree between photos, on it they do not. Fog that turned clear, that the photos really look
into, and that is wide enough not to be a highlight's ghost, is a hollow.

Invariant: hollows only ever remove from the hull, and never reach through to its other side. The next step is
``train``.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor
from torch.nn import functional

from workloads.reconstruction.field import Lattice, interpolate, relax
from workloads.reconstruction.hull import Grid
from workloads.reconstruction.volume import Rays

#: Voxels along the longest side: hollows are coarse things.
RESOLUTION = 32

#: Fog's logit at the start: a hull some voxels deep is nearly opaque, yet light reaches inside.
FIRST_LOGIT = -1.5

#: A node's opacity below which it is clear, and the light that must reach it from some photo.
CLEAR, SEEN = 0.25, 0.5

#: A hollow must hold a cube of this many voxels, and reach this many voxels below the hull's surface;
#: what is shallower is left to training, which moves a surface that far by itself.
WIDTH, DEPTH = 4, 2.5

#: Share by which fog is pulled towards its neighbours in each step.
RELAX = 0.1

#: Rays in each step.
RAYS = 1024

LEARNING_RATE = {"fog": 0.3, "colour": 0.2}


class Fog:
    """Density and colour at the nodes of a coarse lattice; clear outside the hull and kept so."""

    def __init__(self, lattice: Lattice, hull: Tensor, colour: Tensor) -> None:
        self.lattice = lattice
        self.hull = hull
        self.logit = torch.where(hull < 0.3, FIRST_LOGIT, -12.0)[:, None].requires_grad_()
        self.colour = colour.detach().clone().requires_grad_()

    def march(self, rays: Rays, jitter: Tensor) -> tuple[Tensor, Tensor]:
        """Return sample points (n, samples, 3) one voxel apart, and which lie near the hull (n, samples)."""
        step = self.lattice.grid.voxel
        count = int(float((rays.far - rays.near).max()) / step) + 2
        along = rays.near[:, None] + (torch.arange(count, device=jitter.device) - 1 + jitter[:, None]) * step
        points = rays.origins[:, None] + along[..., None] * rays.directions[:, None]
        near_hull = self.hull[self.lattice.nearest(points.view(-1, 3))].view(along.shape) < 1.5
        return points, near_hull & (along >= rays.near[:, None]) & (along <= rays.far[:, None])

    def trace(self, points: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the colour (n, 3), and per sample its share of it and the light that reaches it."""
        index, weights = self.lattice.corners(points[kept])
        logit = interpolate(self.logit, index, weights)
        colour = interpolate(self.colour, index, weights)
        depth = points.new_zeros(kept.shape).masked_scatter(kept, functional.softplus(logit[:, 0]))
        seen = torch.zeros_like(points).masked_scatter(kept[..., None], torch.sigmoid(colour))
        light = torch.exp(depth - torch.cumsum(depth, dim=1))
        share = (1 - torch.exp(-depth)) * light
        return (share[..., None] * seen).sum(dim=1), share, light

    def opacity(self) -> NDArray[np.float32]:
        """Return the opacity of one voxel at each node."""
        opaque = 1 - torch.exp(-functional.softplus(self.logit.detach()))
        return np.asarray(opaque.reshape(self.lattice.grid.shape).cpu().numpy())


def clear_fog(fog: Fog, rays: Rays, steps: int, batch: int, generator: torch.Generator) -> None:
    """Optimise the fog until it looks like the photos."""
    device = rays.near.device
    optimiser = torch.optim.Adam(
        [
            {"params": [fog.logit], "lr": LEARNING_RATE["fog"]},
            {"params": [fog.colour], "lr": LEARNING_RATE["colour"]},
        ],
        betas=(0.9, 0.99),
    )
    shape = fog.lattice.grid.shape
    for _ in range(steps):
        picked = rays.pick(torch.randint(len(rays), (batch,), generator=generator).to(device))
        jitter = torch.rand(batch, generator=generator).to(device)
        colour, share, _ = fog.trace(*fog.march(picked, jitter))
        opacity = share.sum(dim=1)
        drawn = colour + (1 - opacity)[:, None] * picked.paper
        loss = (drawn - picked.photo).square().sum(dim=1).mean()
        loss = loss + 0.5 * (opacity - picked.coverage).square().mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        relax(fog.logit.detach(), shape, RELAX)


def hollow_mask(fog: Fog, rays: Rays, generator: torch.Generator) -> NDArray[np.bool_]:
    """Return the nodes inside the hull that are hollow."""
    shape = fog.lattice.grid.shape
    hull = fog.hull.reshape(shape).cpu().numpy()
    inside = hull < 0
    lit = _lit_nodes(fog, rays, generator) >= SEEN
    clear = (fog.opacity() < CLEAR) & lit
    # Opening: what a cube of WIDTH voxels does not fit into is a ghost. Outside counts as clear for that,
    # or a hollow would have to be wide enough without its mouth.
    cube = np.ones((WIDTH, WIDTH, WIDTH), dtype=bool)
    air = ndimage.binary_opening(np.pad(clear | ~inside, WIDTH, constant_values=True), cube)
    air = air[WIDTH:-WIDTH, WIDTH:-WIDTH, WIDTH:-WIDTH]
    pieces, _ = ndimage.label(air)
    hollow = inside & air & (pieces == pieces[0, 0, 0])
    pieces, count = ndimage.label(hollow)
    depths = ndimage.maximum(-hull, pieces, np.arange(1, count + 1)) if count else np.zeros(0)
    return np.isin(pieces, np.flatnonzero(np.asarray(depths) >= DEPTH) + 1)


def find_hollows(
    lattice: Lattice, hull: Tensor, colour: Tensor, rays: Rays, steps: int, seed: int
) -> NDArray[np.bool_]:
    """Return the hollow nodes of a lattice, given the hull's distance (in voxels) and first colours."""
    generator = torch.Generator().manual_seed(seed)
    fog = Fog(lattice, hull, colour)
    clear_fog(fog, rays, steps, RAYS, generator)
    return hollow_mask(fog, rays, generator)


@torch.no_grad()
def _lit_nodes(fog: Fog, rays: Rays, generator: torch.Generator) -> NDArray[np.float32]:
    """Return the most light that reaches each node from any of some twenty thousand training pixels."""
    device = rays.near.device
    best = torch.zeros(fog.hull.shape, device=device)
    for _ in range(10):
        picked = rays.pick(torch.randint(len(rays), (2048,), generator=generator).to(device))
        points, kept = fog.march(picked, torch.rand(2048, generator=generator).to(device))
        _, _, light = fog.trace(points, kept)
        index, weights = fog.lattice.corners(points[kept])
        nearest = index.gather(1, weights.argmax(dim=1, keepdim=True))[:, 0]
        best.scatter_reduce_(0, nearest, light[kept], reduce="amax")
    shape = fog.lattice.grid.shape
    return np.asarray(ndimage.maximum_filter(best.reshape(shape).cpu().numpy(), 3))


def hollow_distance(mask: NDArray[np.bool_], grid: Grid, points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how deep points lie in a hollow: positive inside it, negative outside, in scene units."""
    if not mask.any():
        return np.full(len(points), -np.inf)
    signed = ndimage.distance_transform_edt(mask) - ndimage.distance_transform_edt(~mask)
    signed = ndimage.gaussian_filter(signed - np.sign(signed) * 0.5, 0.7)
    position = (points - grid.origin).T / grid.voxel
    return np.asarray(ndimage.map_coordinates(signed, position, order=1, mode="nearest") * grid.voxel)
