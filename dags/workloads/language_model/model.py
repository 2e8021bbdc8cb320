"""A GPT-2-style transformer over bytes.

The architecture of GPT-2 (learned positions, pre-norm blocks, GELU, tied output weights) at a size that a
CPU core trains in seconds. Bytes as tokens need no vocabulary file. `pretrain` makes one, `training`
fine-tunes it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

BYTES = 256


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The numbers that fix the shape of every weight."""

    context: int = 64
    width: int = 96
    heads: int = 4
    layers: int = 2
    dropout: float = 0.05


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.norm_attention = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.norm_feed_forward = nn.LayerNorm(size.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for ``x`` of (batch, time, width)."""
        batch, time, width = x.shape
        parts = self.query_key_value(self.norm_attention(x)).chunk(3, dim=-1)
        query, key, value = (
            part.view(batch, time, self.size.heads, width // self.size.heads).transpose(1, 2)
            for part in parts
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.project(attended.transpose(1, 2).reshape(batch, time, width)))
        return x + self.dropout(self.feed_forward(self.norm_feed_forward(x)))


class ByteTransformer(nn.Module):
    """Predicts the next byte at each position."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.bytes = nn.Embedding(BYTES, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.apply(_initialise)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the byte that follows each of ``tokens`` (batch, time)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.bytes(tokens) + self.positions(positions))
        return functional.linear(self.norm(hidden), self.bytes.weight)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy, in nats, of predicting each byte of ``windows``."""
        logits = self(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def save_model(model: ByteTransformer, folder: Path) -> None:
    """Write weights and size into ``folder``."""
    torch.save(model.state_dict(), folder / "weights.pt")
    (folder / "size.json").write_text(json.dumps(asdict(model.size)))


def load_model(folder: Path) -> ByteTransformer:
    """Return the model that `save_model` wrote."""
    model = ByteTransformer(ModelSize(**json.loads((folder / "size.json").read_text())))
    model.load_state_dict(torch.load(folder / "weights.pt", map_location="cpu", weights_only=True))
    return model


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
