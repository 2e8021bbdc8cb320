"""The state in buffers: averaged, snapshotted and put back without losing a bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.averaging import GradientAveraging
from airflow_gpu_provider.training.state import TrainingState

CPU = torch.device("cpu")


def new_state(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, *, width: int = 4) -> TrainingState:
    model = nn.Sequential(
        nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1, dtype=torch.float32)
    )
    return TrainingState([model], [optimizer(model.parameters(), lr=0.1)])


def step(state: TrainingState, times: int = 1) -> None:
    for _ in range(times):
        for optimizer in state.optimizers:
            optimizer.zero_grad()
        state.models[0](torch.randn(8, 3)).square().mean().backward()
        for optimizer in state.optimizers:
            optimizer.step()


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.AdamW,
        torch.optim.SGD,
        torch.optim.NAdam,
        torch.optim.Adagrad,
        torch.optim.Rprop,
        torch.optim.RMSprop,
    ],
)
def test_a_rollback_restores_every_bit_whatever_the_optimizer_keeps(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    state = new_state(optimizer)
    untouched = state.snapshot(0, state.pack(CPU))
    digest_of_nothing = state.digest()
    step(state, 3)
    snapshot, digest = state.snapshot(3, state.pack(CPU)), state.digest()
    step(state, 2)
    assert state.digest() != digest
    state.restore(snapshot)
    assert state.digest() == digest
    state.restore(untouched)
    assert state.digest() == digest_of_nothing, "before the first step an optimizer has no state"


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad])
def test_a_newcomer_takes_the_state_of_a_shard_that_has_stepped(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    veteran, newcomer = new_state(optimizer), new_state(optimizer)
    step(veteran, 3)
    newcomer.align(veteran.layout(), veteran.scalars())
    newcomer.unpack(veteran.pack(CPU))
    assert newcomer.digest() == veteran.digest()


def test_making_the_optimizers_state_leaves_the_weights_alone() -> None:
    state = new_state()
    before = [parameter.clone() for parameter in state.models[0].parameters()]
    state.materialise()
    for parameter, value in zip(state.models[0].parameters(), before, strict=True):
        assert torch.equal(parameter, value) and parameter.grad is None
    assert any("exp_avg" in name for name, _, _ in state.layout())


def test_half_precision_survives_the_way_through_the_buffers() -> None:
    model = nn.Linear(3, 2).to(torch.bfloat16)
    state = TrainingState([model], [torch.optim.SGD(model.parameters(), lr=0.1)])
    digest = state.digest()
    flats = state.pack(CPU)
    assert list(flats) == [torch.float32]
    state.unpack(flats)
    assert state.digest() == digest


def test_other_models_are_told_apart_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"different models: model0\.parameter\.0\.weight"):
        new_state().align(new_state(width=5).layout(), {})


def test_an_optimizer_of_an_unregistered_model_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="belong to no registered model"):
        TrainingState([nn.Linear(2, 2)], [torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)])


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="LBFGS cannot step without a closure"):
        new_state(torch.optim.LBFGS).materialise()


def test_the_scale_of_mixed_precision_is_shared_and_rolled_back_like_the_weights() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = TrainingState([net], [optimizer], scaler)
    snapshot = state.snapshot(1, state.pack(torch.device("cpu")))
    scaler.scale(net(torch.full((1, 2), torch.inf)).sum()).backward()
    scaler.unscale_(optimizer)
    weights = [parameter.detach().clone() for parameter in net.parameters()]
    state.step(optimizer)
    assert scaler.get_scale() == 512.0, "a step of infinities halves the scale"
    assert all(bool((a == b).all()) for a, b in zip(net.parameters(), weights, strict=True)), (
        "and is left out"
    )
    state.restore(snapshot)
    assert scaler.get_scale() == 1024.0
    for _ in range(2):  # the same step again after a fault
        state.forget_unfinished_step()
        scaler.unscale_(optimizer)
    with pytest.raises(InvalidRequest, match="one optimizer and 2"):
        TrainingState([net], [optimizer, optimizer], scaler)


def test_sharing_gradients_takes_one_optimizer() -> None:
    model = nn.Linear(2, 2)
    two = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    with pytest.raises(InvalidRequest, match="2 were registered"):
        GradientAveraging(TrainingState([model], two))
