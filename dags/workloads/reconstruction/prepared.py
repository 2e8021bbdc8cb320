"""What preprocessing hands to training and scoring: one file in the product's scratch folder.

Invariant: everything is in the normalised frame (all cameras see the unit sphere whole); ``centre`` and
``radius`` lead back to the photographer's frame. Written by ``preprocess``, read by ``train`` and
``postprocess``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from workloads.reconstruction.cameras import Cameras

FILE = "prepared.npz"


@dataclass(frozen=True)
class Prepared:
    """Photos, silhouettes and cameras of one product."""

    photos: NDArray[np.uint8]
    #: share of each pixel that the product covers, 0..1; (n, height, width)
    coverage: NDArray[np.float64]
    #: backdrop without the product; (n, height, width, 3)
    paper: NDArray[np.float64]
    cameras: Cameras
    #: True for views that training never sees; (n,)
    held_out: NDArray[np.bool_]
    #: True for views whose outline contradicts the others'; (n,)
    left_out: NDArray[np.bool_]
    #: corners of the box that holds the product; (2, 3)
    box: NDArray[np.float64]
    #: middle of the normalised sphere in the photographer's frame
    centre: NDArray[np.float64]
    radius: float

    @property
    def training_views(self) -> NDArray[np.int64]:
        """Indices of the views that training may use."""
        return np.flatnonzero(~self.held_out & ~self.left_out)

    @property
    def held_out_views(self) -> NDArray[np.int64]:
        """Indices of the views kept for scoring."""
        return np.flatnonzero(self.held_out)

    def save(self, folder: Path) -> None:
        """Write everything into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(
            folder / FILE,
            photos=self.photos,
            coverage=np.round(self.coverage * 255).astype(np.uint8),
            paper=self.paper.astype(np.float16),
            files=np.array(self.cameras.files),
            intrinsics=self.cameras.intrinsics,
            poses=self.cameras.poses,
            size=np.array(self.cameras.size),
            held_out=self.held_out,
            left_out=self.left_out,
            box=self.box,
            centre=self.centre,
            radius=np.array(self.radius),
        )

    @classmethod
    def load(cls, folder: Path) -> Prepared:
        """Read what ``save`` wrote; FileNotFoundError says that preprocessing has not run."""
        path = folder / FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: run the stage preprocess before train and postprocess"
            )
        with np.load(path, allow_pickle=False) as data:
            height, width = (int(value) for value in data["size"])
            return cls(
                photos=data["photos"],
                coverage=data["coverage"].astype(np.float64) / 255,
                paper=data["paper"].astype(np.float64),
                cameras=Cameras(
                    tuple(str(name) for name in data["files"]),
                    data["intrinsics"],
                    data["poses"],
                    (height, width),
                ),
                held_out=data["held_out"],
                left_out=data["left_out"],
                box=data["box"],
                centre=data["centre"],
                radius=float(data["radius"]),
            )
