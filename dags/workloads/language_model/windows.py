"""Windows of text as batches: which bytes a shard sees at a step is a function of (seed, step, shard) alone.

That is what lets a spare do exactly the work of a shard that was lost. Nothing is iterated, so nothing has
to be wound back.
"""

from __future__ import annotations

from pathlib import Path

import torch


class TextWindows:
    """One file of bytes, read as windows of ``context + 1``."""

    def __init__(self, file: Path, context: int) -> None:
        content = bytearray(file.read_bytes())
        if len(content) <= context + 1:
            raise ValueError(
                f"{file} has {len(content)} bytes, a window needs {context + 2}; give a larger text."
            )
        self._text = torch.frombuffer(content, dtype=torch.uint8)
        self._length = context + 1

    def batch(self, size: int, *, seed: int, step: int, shard: int) -> torch.Tensor:
        """Return ``size`` random windows for this step of this shard."""
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 4_099 + shard)
        starts = torch.randint(len(self._text) - self._length, (size,), generator=generator)
        return self._take(starts)

    def evenly(self, count: int) -> torch.Tensor:
        """Return ``count`` windows spread evenly over the text, always the same ones."""
        return self._take(torch.linspace(0, len(self._text) - self._length, count).long())

    def _take(self, starts: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._text[start : start + self._length] for start in starts.tolist()]).long()
