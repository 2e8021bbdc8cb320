"""Stage 2 (GPU lease, or CPU): optimise the field until it renders to the training photos.

Starts from the visual hull without its hollows (see ``hollows``), so that few steps are needed; soft first,
so that the surface can move, then sharp, so that edges are exact. Held-out views are never touched. Entry
point ``workloads.reconstruction.train:train``; the next stage is ``postprocess``.

Parameters of the product (all optional): ``steps`` (of each of the two phases, hollows and surface),
``resolution`` (voxels along the longest side), ``seed``, ``rays`` per step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from airflow_gpu_provider.catalog.product import Product
from workloads.reconstruction import hollows
from workloads.reconstruction.field import Field, Lattice, relax
from workloads.reconstruction.figures import write_figures
from workloads.reconstruction.hull import Grid, hull_distance, outline_distances
from workloads.reconstruction.prepared import Prepared
from workloads.reconstruction.volume import Rays, render

#: Pixels farther than this from the outline see backdrop whatever training does; the hull says so already.
OUTLINE_MARGIN = 5

#: Sharpness per voxel at the start and the end.
SHARPNESS = (1.5, 6.0)

LEARNING_RATE = {"distance": 0.06, "colour": 0.10}
LR_DECAY = 0.8
SILHOUETTE_WEIGHT = 0.5
#: Each step moves distances this share towards their neighbours' mean, fading to a tenth of it.
RELAX = 0.03


@dataclass(frozen=True)
class TrainingPlan:
    """What the run's parameters ask for."""

    steps: int = 150
    resolution: int = 64
    seed: int = 0
    rays: int = 2048

    @classmethod
    def from_params(cls, params: Mapping[str, object]) -> TrainingPlan:
        """Check the parameters; ValueError names the one that is out of range and the range."""
        limits = {
            "steps": (1, 100_000),
            "resolution": (16, 512),
            "seed": (0, 2**31 - 1),
            "rays": (64, 1_000_000),
        }
        values: dict[str, int] = {}
        for name, (low, high) in limits.items():
            given = params.get(name, getattr(cls, name))
            try:
                value = int(str(given))
            except ValueError:
                value = low - 1
            if not low <= value <= high:
                raise ValueError(
                    f"parameter {name}={given!r}; allowed is a whole number from {low} to {high}"
                )
            values[name] = value
        return cls(**values)


def train(product: Product) -> Mapping[str, object]:
    """Optimise geometry and colour on ``product.device``; write ``field.npz``; return small figures."""
    started = time.monotonic()
    plan = TrainingPlan.from_params(product.params)
    device = torch.device(product.device)
    if device.type == "cpu":
        # Tensors this small gain nothing from threads, and several products share a machine's cores.
        torch.set_num_threads(1)
    prepared = Prepared.load(product.work_dir)
    field, loss = optimise(prepared, plan, device)
    field.save(product.work_dir)
    figures = {
        "steps": plan.steps,
        "resolution": plan.resolution,
        "loss": round(loss, 6),
        "device": product.device_name,
        "seconds": round(time.monotonic() - started, 3),
    }
    write_figures(product.work_dir, "train", figures)
    return figures


def optimise(prepared: Prepared, plan: TrainingPlan, device: torch.device) -> tuple[Field, float]:
    """Return the trained field and the mean loss of its last steps."""
    rays = gather_rays(prepared, device)
    coarse = Grid.over(prepared.box, min(hollows.RESOLUTION, plan.resolution))
    hull = _hull_field(prepared, coarse, device)
    mask = hollows.find_hollows(
        hull.lattice, hull.distance.detach()[:, 0], hull.colour, rays, plan.steps, plan.seed
    )
    grid = Grid.over(prepared.box, plan.resolution)
    field = _hull_field(prepared, grid, device)
    depth = hollows.hollow_distance(mask, coarse, grid.nodes()) / grid.voxel
    with torch.no_grad():
        hollow = torch.tensor(depth, dtype=torch.float32, device=device)[:, None]
        field.distance.copy_(torch.maximum(field.distance, hollow))
    generator = torch.Generator().manual_seed(plan.seed)
    return field, _sharpen(field, rays, plan.steps, plan.rays, generator)


def gather_rays(prepared: Prepared, device: torch.device) -> Rays:
    """Return the pixels of the training views that can see the product or its surroundings."""
    columns: list[list[np.ndarray]] = []
    low, high = prepared.box
    for view in prepared.training_views:
        origin, directions = prepared.cameras.rays(view)
        with np.errstate(divide="ignore"):
            to_low, to_high = (low - origin) / directions, (high - origin) / directions
        near = np.minimum(to_low, to_high).max(axis=1)
        far = np.maximum(to_low, to_high).min(axis=1)
        around = ndimage.binary_dilation(prepared.coverage[view] > 0, iterations=OUTLINE_MARGIN).ravel()
        use = (far > near) & around
        columns.append(
            [
                np.broadcast_to(origin, directions.shape)[use],
                directions[use],
                near[use],
                far[use],
                prepared.photos[view].reshape(-1, 3)[use] / 255,
                prepared.paper[view].reshape(-1, 3)[use],
                prepared.coverage[view].ravel()[use],
            ]
        )
    joined = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return Rays(*(torch.tensor(values, dtype=torch.float32, device=device) for values in joined))


def _hull_field(prepared: Prepared, grid: Grid, device: torch.device) -> Field:
    distances = outline_distances(prepared.coverage)
    hull = hull_distance(grid.nodes(), prepared.cameras, prepared.training_views, distances) / grid.voxel
    views = prepared.training_views
    seen = prepared.photos[views][prepared.coverage[views] > 0.99] / 255
    mean = np.clip(seen.mean(axis=0), 0.02, 0.98)
    distance = torch.tensor(hull, dtype=torch.float32, device=device)
    logits = torch.tensor(np.log(mean / (1 - mean)), dtype=torch.float32, device=device)
    return Field(Lattice.on(grid, device), distance, logits.repeat(len(hull), 1))


def _sharpen(field: Field, rays: Rays, steps: int, batch: int, generator: torch.Generator) -> float:
    """Optimise the field; return the mean loss of the last tenth of the steps."""
    optimiser = torch.optim.Adam(
        [
            {"params": [field.distance], "lr": LEARNING_RATE["distance"]},
            {"params": [field.colour], "lr": LEARNING_RATE["colour"]},
        ],
        betas=(0.9, 0.99),
        eps=1e-10,
    )
    recent: list[Tensor] = []
    for step in range(steps):
        progress = step / max(steps - 1, 1)
        # Smaller steps towards the end: what is left to learn is smaller than the noise of a batch.
        for group, rate in zip(optimiser.param_groups, LEARNING_RATE.values(), strict=True):
            group["lr"] = rate * (1 - progress * LR_DECAY)
        sharpness = SHARPNESS[0] * (SHARPNESS[1] / SHARPNESS[0]) ** progress
        # Drawn on the CPU, so that a seed means the same rays on every device.
        index = torch.randint(len(rays), (batch,), generator=generator).to(rays.near.device)
        jitter = torch.rand(batch, generator=generator).to(rays.near.device)
        picked = rays.pick(index)
        colour, opacity = render(field, picked, sharpness, jitter)
        loss = (colour - picked.photo).square().sum(dim=1).mean()
        loss = loss + SILHOUETTE_WEIGHT * (opacity - picked.coverage).square().mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        relax(field.distance, field.lattice.grid.shape, RELAX * (1 - 0.9 * progress))
        if step >= steps * 0.9:
            recent.append(loss.detach())
    return float(torch.stack(recent).mean()) if recent else 0.0
