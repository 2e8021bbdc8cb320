"""The training state as flat buffers: what is averaged, snapshotted, sent to a newcomer and put back.

Covers parameters, buffers and the optimizer's state, since averaging weights alone leaves Adam's moments of
each shard apart. An optimizer makes its state at its first step, so a process that has not stepped has to be
brought to the layout of one that has (`align`) before it can take its values. Next: `step_loop` decides
when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from airflow_gpu_provider.exceptions import InvalidRequest

Flats = dict[torch.dtype, torch.Tensor]
Layout = list[tuple[str, str, list[int]]]  #: name, dtype, shape
Scalars = dict[str, float | int | bool]


@dataclass(frozen=True)
class Snapshot:
    """A copy of the whole state at one version."""

    version: int
    flats: Flats
    layout: Layout
    scalars: Scalars


class TrainingState:
    """The registered models and optimizers, seen as one named list of tensors."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.models = list(models)
        self.optimizers = list(optimizers)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self._scaler is not None:
            if len(self.optimizers) != 1:
                raise InvalidRequest(
                    f"A GradScaler goes with one optimizer and {len(self.optimizers)} were registered; "
                    "register one, or compute in bfloat16, which needs no scaler."
                )
            if self._scaler._scale is None:  # made at the first loss otherwise, and a spare has none
                self._scaler._lazy_init_scale_growth_tracker(next(self.models[0].parameters()).device)
        known = {id(parameter) for model in self.models for parameter in model.parameters()}
        strangers = sum(id(parameter) not in known for parameter in self._optimized())
        if strangers:
            raise InvalidRequest(
                f"{strangers} parameters of the optimizer belong to no registered model; pass every model to "
                "ctx.register(model, optimizer), otherwise shards would drift apart."
            )

    @property
    def has_scaler(self) -> bool:
        """True when a scaler leaves out the steps whose gradients are not finite."""
        return self._scaler is not None

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step an optimizer, through the scaler where there is one: that leaves a step of infinities out."""
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()

    def fill_in(self) -> None:
        """Let the optimizer have its state even where the scaler has left out every step so far."""
        if self._scaler is not None and not all(optimizer.state for optimizer in self.optimizers):
            self.materialise()

    def forget_unfinished_step(self) -> None:
        """Let the author's ``scaler.unscale_(optimizer)`` of a step that is done again count for nothing."""
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()

    def pack(self, device: torch.device) -> Flats:
        """Copy the state into one buffer per kind of number, on ``device``."""
        parts: dict[torch.dtype, list[torch.Tensor]] = {}
        for _, tensor in self._tensors():
            dtype = _bucket(tensor.dtype)
            parts.setdefault(dtype, []).append(tensor.detach().reshape(-1).to(device, dtype))
        return {dtype: torch.cat(tensors) for dtype, tensors in parts.items()}

    @torch.no_grad()
    def unpack(self, flats: Flats) -> None:
        """Copy buffers of the same layout back into the state."""
        offsets = dict.fromkeys(flats, 0)
        for _, tensor in self._tensors():
            dtype = _bucket(tensor.dtype)
            start = offsets[dtype]
            offsets[dtype] = start + tensor.numel()
            tensor.copy_(flats[dtype][start : start + tensor.numel()].view_as(tensor))

    def snapshot(self, version: int, flats: Flats) -> Snapshot:
        """Return ``flats`` with what is needed to put them back."""
        return Snapshot(version, flats, self.layout(), self.scalars())

    def restore(self, snapshot: Snapshot) -> None:
        """Put a snapshot back, wherever the state has gone since."""
        self.align(snapshot.layout, snapshot.scalars)
        self.unpack(snapshot.flats)

    def layout(self) -> Layout:
        """Return name, dtype and shape of every tensor, in the order of the buffers."""
        return [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in self._tensors()]

    def layout_digest(self) -> int:
        """Return a number that is equal on shards whose buffers have the same layout."""
        return int.from_bytes(hashlib.sha256(repr(self.layout()).encode()).digest()[:7], "big")

    def scalars(self) -> Scalars:
        """Return the optimizers' state that is plain numbers."""
        return {
            name: value
            for name, _, _, value in self._optimizer_entries()
            if isinstance(value, bool | int | float)
        }

    def align(self, layout: Layout, scalars: Scalars) -> None:
        """Make the optimizers hold exactly the entries of ``layout``, with arbitrary values."""
        wanted = {name for name, _, _ in layout} | set(scalars)
        if wanted - self._names():
            self.materialise()
        for name, state, key, _ in list(self._optimizer_entries()):
            if name not in wanted:
                del state[key]
            elif name in scalars:
                state[key] = scalars[name]
        for optimizer in self.optimizers:
            for parameter in [parameter for parameter, state in optimizer.state.items() if not state]:
                del optimizer.state[parameter]
        if (own := self.layout()) != [(name, dtype, list(shape)) for name, dtype, shape in layout]:
            raise InvalidRequest(_difference(own, layout))

    def materialise(self) -> None:
        """Let the optimizers create their state by a step with zero gradients; the weights do not change."""
        for optimizer in self.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            kept = [(p, p.detach().clone(), p.grad) for p in parameters]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            try:
                optimizer.step()
            except TypeError as error:
                raise InvalidRequest(
                    f"{type(optimizer).__name__} cannot step without a closure ({error}); use an optimizer "
                    "whose step() takes no argument, for example AdamW or SGD."
                ) from error
            with torch.no_grad():
                for parameter, value, gradient in kept:
                    parameter.copy_(value)
                    parameter.grad = gradient

    def buffers(self) -> list[torch.Tensor]:
        """Return the models' buffers, which a forward pass may change."""
        return [buffer for model in self.models for buffer in model.buffers()]

    def digest(self) -> str:
        """Return the sha256 of the whole state: equal digests mean bitwise equal training."""
        return digest_of(self.named_tensors())

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all of the state, each tensor once, in the order of the buffers."""
        return self._tensors()

    def _names(self) -> set[str]:
        return {name for name, _ in self._tensors()} | set(self.scalars())

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for index, model in enumerate(self.models):
            for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
                for name, tensor in named:
                    if id(tensor) not in seen:  # models may share parameters
                        seen.add(id(tensor))
                        yield f"model{index}.{kind}.{name}", tensor
        for name, _, _, value in self._optimizer_entries():
            if isinstance(value, torch.Tensor):
                yield name, value
        if self._scaler is not None:
            for name in ("_scale", "_growth_tracker"):
                yield f"scaler.{name[1:]}", getattr(self._scaler, name)

    def _optimizer_entries(self) -> Iterator[tuple[str, dict[str, object], str, object]]:
        for index, optimizer in enumerate(self.optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for position, parameter in enumerate(parameters):
                state = optimizer.state.get(parameter, {})
                for key in sorted(state):
                    yield f"optimizer{index}.{position}.{key}", state, key, state[key]

    def _optimized(self) -> Iterator[torch.Tensor]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]


def digest_of(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the sha256 of named tensors."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _bucket(dtype: torch.dtype) -> torch.dtype:
    """Return the kind of number a tensor travels as: halves are averaged in single precision."""
    if dtype.is_complex:
        raise InvalidRequest("Complex parameters cannot be averaged; keep real and imaginary parts apart.")
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float64 if dtype == torch.float64 else torch.float32


def _difference(own: Layout, other: Layout) -> str:
    mine, theirs = {entry[0] for entry in own}, {entry[0] for entry in other}
    names = sorted(mine ^ theirs) or [
        a[0] for a, b in zip(own, other, strict=False) if a != (b[0], b[1], list(b[2]))
    ]
    return (
        f"Shards built different models: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''} differ in "
        "name, dtype or shape; build the model from ctx.params alone, without looking at the shard."
    )
