"""Numbers that are not finite: found before all shards share them, with the step and the shard they began at.

Afterwards every shard holds the same damage and none can be named. Raised where the author's code would go
on; `failures` makes it the run's end, since another process would compute the same. Used by `context` and
`averaging`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

_ADVICE = (
    "lower the learning rate or clip the gradients, and look for bad samples in that shard's batch{more}; "
    "where such steps are expected, say allow_non_finite_loss=True"
)


class NonFiniteLoss(Exception):
    """A loss, gradients or weights are NaN or infinite; nothing of this window is shared or saved."""


def check_loss(loss: float, *, step: int, shard: int) -> None:
    """Raise NonFiniteLoss for a loss that is not finite."""
    if not math.isfinite(loss):
        advice = _ADVICE.format(more="")
        raise NonFiniteLoss(f"the loss of shard {shard} is {loss} at step {step}; {advice}")


def check_weights(weights: Iterable[torch.Tensor], *, step: int | None, shard: int, on: torch.device) -> None:
    """Raise NonFiniteLoss for weights that are not finite; waits for the device once."""
    live = [weight.detach() for weight in weights]
    # Sums cost a fiftieth of looking at each number; only what overflows has to be looked at again.
    sums = torch.stack([weight.sum().to(on, torch.float32) for weight in live])
    if not are_finite([sums]) and not are_finite(live):
        raise NonFiniteLoss(
            f"the weights of shard {shard} are not finite after step {step}, though no loss that it reported "
            "was; clip the gradients, and look for roots and logarithms of zero; where such weights are "
            "expected, say allow_non_finite_loss=True"
        )


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Say whether all numbers are finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def gradients_of(shards: Sequence[int], step: int) -> NonFiniteLoss:
    """Return the error for gradients that were not finite before they were averaged, of these shards."""
    advice = _ADVICE.format(more=", for roots and logarithms of zero")
    if not shards:
        return NonFiniteLoss(
            f"the sum of the shards' gradients is not finite at step {step}, though each of them is; {advice}"
        )
    names = f"shard{'s' if len(shards) > 1 else ''} {', '.join(map(str, shards))}"
    return NonFiniteLoss(f"the gradients of {names} are not finite at step {step}; {advice}")
