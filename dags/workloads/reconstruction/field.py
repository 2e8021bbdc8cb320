"""The differentiable representation: a signed distance and a colour at each node of a voxel grid.

Distances are stored in voxels, so that one learning rate fits every product and resolution; colours are
stored as logits. Values between nodes are trilinear. A ray is absorbed where the distance turns negative:
between two samples the share ``1 - sigmoid(s * next) / sigmoid(s * here)`` of the light is stopped (the
discrete form of NeuS), so the silhouette of the field is the silhouette of its zero surface without bias.

Invariant: the same code runs on any torch device; nothing is drawn at random here. Used by ``train``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from workloads.reconstruction.hull import Grid

FILE = "field.npz"


@dataclass(frozen=True)
class Lattice:
    """A ``Grid`` on a torch device, with the lookups that interpolation needs."""

    grid: Grid
    origin: Tensor
    strides: Tensor
    corner_offsets: Tensor
    last_cell: Tensor

    @classmethod
    def on(cls, grid: Grid, device: torch.device) -> Lattice:
        """Prepare ``grid`` for ``device``."""
        strides = torch.tensor([grid.shape[1] * grid.shape[2], grid.shape[2], 1], device=device)
        bits = torch.tensor([[i, j, k] for i in (0, 1) for j in (0, 1) for k in (0, 1)], device=device)
        return cls(
            grid=grid,
            origin=torch.tensor(grid.origin, dtype=torch.float32, device=device),
            strides=strides,
            corner_offsets=(bits * strides).sum(dim=1),
            last_cell=torch.tensor(grid.shape, device=device) - 2,
        )

    def nearest(self, points: Tensor) -> Tensor:
        """Return the index of the cell's first node for each point, clamped into the grid."""
        # Whole numbers in float32 are exact up to 2**24, more nodes than a grid has; convert once.
        cell = ((points - self.origin) * (1 / self.grid.voxel)).floor_()
        cell = torch.minimum(cell.clamp_(min=0), self.last_cell.to(cell.dtype))
        x, y, z = cell.unbind(dim=-1)
        return (x * (self.grid.shape[1] * self.grid.shape[2]) + y * self.grid.shape[2] + z).long()

    def corners(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the 8 node indices (n, 8) round each point and their trilinear weights (n, 8)."""
        position = (points - self.origin) / self.grid.voxel
        cell = torch.minimum(position.long().clamp_(min=0), self.last_cell)
        x, y, z = (position - cell).clamp_(0, 1).unbind(dim=1)
        index = (cell * self.strides).sum(dim=1, keepdim=True) + self.corner_offsets
        low, high = torch.stack([(1 - x) * (1 - y), (1 - x) * y, x * (1 - y), x * y], dim=1), (1 - z, z)
        weights = torch.stack([low * high[0][:, None], low * high[1][:, None]], dim=2)
        return index, weights.reshape(-1, 8)


class _WeightedRows(torch.autograd.Function):
    """Weighted sums of table rows; torch's own gradient of ``embedding_bag`` takes five times as long."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(index, weights)
        ctx.rows = len(table)
        return functional.embedding_bag(index, table, per_sample_weights=weights, mode="sum")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        index, weights = ctx.saved_tensors
        spread = (weights[..., None] * gradient[:, None]).view(-1, gradient.shape[1])
        return (
            gradient.new_zeros(ctx.rows, gradient.shape[1]).index_add_(0, index.view(-1), spread),
            None,
            None,
        )


def interpolate(table: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return, for each point, the weighted sum of the table's rows at its corners; (points, columns)."""
    result: Tensor = _WeightedRows.apply(table, index, weights)
    return result


@torch.no_grad()
def relax(values: Tensor, shape: tuple[int, int, int], strength: float) -> None:
    """Move node values (in place) towards the mean of their six neighbours: noise goes, the shape stays."""
    grid = values.view(1, 1, *shape)
    padded = functional.pad(grid, (1, 1, 1, 1, 1, 1), mode="replicate")
    mean = (
        padded[:, :, 2:, 1:-1, 1:-1]
        + padded[:, :, :-2, 1:-1, 1:-1]
        + padded[:, :, 1:-1, 2:, 1:-1]
        + padded[:, :, 1:-1, :-2, 1:-1]
        + padded[:, :, 1:-1, 1:-1, 2:]
        + padded[:, :, 1:-1, 1:-1, :-2]
    ) / 6
    grid.lerp_(mean, strength)


class Field(torch.nn.Module):
    """Distances (in voxels) and colour logits at the nodes of a lattice."""

    def __init__(self, lattice: Lattice, distance: Tensor, colour: Tensor) -> None:
        super().__init__()
        self.lattice = lattice
        self.distance = torch.nn.Parameter(distance.reshape(-1, 1))
        self.colour = torch.nn.Parameter(colour.reshape(-1, 3))

    def sample(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return distances (n,) and colours (n, 3) at points."""
        index, weights = self.lattice.corners(points)
        distance = interpolate(self.distance, index, weights)
        colour = interpolate(self.colour, index, weights)
        return distance[:, 0], torch.sigmoid(colour)

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Write the distances, in scene units, and their grid."""
        grid = self.lattice.grid
        distance = self.distance.reshape(grid.shape).cpu().numpy() * grid.voxel
        np.savez(folder / FILE, distance=distance, origin=grid.origin, voxel=np.array(grid.voxel))


def load_distance(folder: Path) -> tuple[NDArray[np.float32], Grid]:
    """Read what ``Field.save`` wrote; FileNotFoundError says that training has not run."""
    path = folder / FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: run the stage train before postprocess")
    with np.load(path, allow_pickle=False) as data:
        distance = data["distance"]
        shape = (distance.shape[0], distance.shape[1], distance.shape[2])
        return distance, Grid(data["origin"], float(data["voxel"]), shape)
