"""Make the small pretrained model that the fine-tuning starts from.

A minute's stand-in for a downloaded checkpoint: the same architecture, trained briefly on other text. Runs
on the CPU in seconds; the folder appears whole (`text.publish_folder`).
"""

from __future__ import annotations

from pathlib import Path

import torch

from workloads.language_model.model import ByteTransformer, ModelSize, save_model
from workloads.language_model.text import PRETRAINING_PACKAGES, library_text, publish_folder
from workloads.language_model.windows import TextWindows


def make_pretrained(
    folder: Path, *, steps: int = 150, size: ModelSize | None = None, seed: int = 0
) -> dict[str, float]:
    """Train a model and write it to ``folder``; return its first and last loss in nats a byte."""
    # Matrices this small are slower on several threads, much so when the cores are shared.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = ByteTransformer(size or ModelSize())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []

    def write(target: Path) -> None:
        text = target / "text.bin"
        text.write_bytes(library_text(PRETRAINING_PACKAGES))
        windows = TextWindows(text, model.size.context)
        text.unlink()
        for step in range(steps):
            loss = model.loss(windows.batch(16, seed=seed, step=step, shard=0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        save_model(model, target)

    publish_folder(folder, write)
    return {"first_loss": losses[0], "last_loss": losses[-1]}
