"""Randomness as a function of (seed, step, shard).

A step that is done again after a fault must draw the numbers it drew before, whoever holds the rank by then.
That is why generators are set anew at each step instead of being carried along and restored.
"""

from __future__ import annotations

import hashlib
import random
import sys

import torch


def seed_everything(seed: int, step: int, shard: int) -> None:
    """Set the generators of Python, torch and, where the author uses it, numpy."""
    digest = hashlib.blake2b(f"{seed}/{step}/{shard}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    random.seed(number)
    # Not torch.manual_seed: without CUDA it notes a stack trace for later, which costs more than the rest.
    torch.default_generator.manual_seed(number & (2**63 - 1))
    if torch.version.cuda or torch.version.hip:
        torch.cuda.manual_seed_all(number & (2**63 - 1))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number & (2**32 - 1))
