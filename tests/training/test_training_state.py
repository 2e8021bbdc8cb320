"""The state in buffers and on disk: nothing is lost, nothing half-written is used."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.averaging import GradientAveraging
from airflow_gpu_provider.training.checkpoint import CheckpointFacts, CheckpointFolder, CheckpointNotWritten
from airflow_gpu_provider.training.state import TrainingState

CPU = torch.device("cpu")
FACTS = CheckpointFacts(shard_count=2, sync_interval=10, seed=0)


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


def test_sharing_gradients_takes_one_optimizer() -> None:
    model = nn.Linear(2, 2)
    two = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    with pytest.raises(InvalidRequest, match="2 were registered"):
        GradientAveraging(TrainingState([model], two))


# -- checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints", FACTS, keep=2)


def test_a_checkpoint_brings_back_every_bit_and_only_the_newest_are_kept(folder: CheckpointFolder) -> None:
    state = new_state()
    for done in (1, 2, 3):
        step(state)
        folder.save(state, done)
    newest = folder.newest()
    assert newest is not None and newest.step == 3 and newest.state_sha256 == state.digest()
    assert sorted(path.name for path in folder.folder.iterdir()) == [
        "step-000000000002.json",
        "step-000000000002.pt",
        "step-000000000003.json",
        "step-000000000003.pt",
    ]
    fresh = new_state()
    folder.load(fresh, newest)
    assert fresh.digest() == state.digest()


@pytest.mark.parametrize("damage", ["cut", "flip", "lost", "record"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    folder: CheckpointFolder, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    state = new_state()
    folder.save(state, 1)
    newest = folder.save(state, 2)
    file = Path(newest.path)
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[:-10])
    elif damage == "flip":
        file.write_bytes(content[:-10] + bytes([content[-10] ^ 1]) + content[-9:])
    elif damage == "lost":
        file.unlink()
    else:
        file.with_suffix(".json").write_text("{")
    with caplog.at_level(logging.WARNING):
        found = folder.newest()
    assert found is not None and found.step == 1
    assert "trying the one before" in caplog.text


def test_a_crash_while_writing_leaves_no_checkpoint(folder: CheckpointFolder) -> None:
    folder.save(new_state(), 1)
    (folder.folder / "step-000000000009.77.tmp").write_bytes(b"half")
    (folder.folder / "step-000000000009.pt").write_bytes(b"its record was never written")
    found = folder.newest()
    assert found is not None and found.step == 1


def test_a_copy_is_written_in_the_background_while_training_goes_on(folder: CheckpointFolder) -> None:
    state = new_state()
    step(state)
    digest = state.digest()
    assert folder.save_in_background(state, 1)
    step(state, 5)
    folder.save(state, 6)  # waits for the thread
    written = folder.take_written()
    assert written is not None and (written.step, written.state_sha256) == (1, digest)
    fresh = new_state()
    folder.load(fresh, written)
    assert fresh.digest() == digest and folder.take_written() is None


def test_a_checkpoint_of_another_model_is_refused(folder: CheckpointFolder) -> None:
    record = folder.save(new_state(), 1)
    with pytest.raises(InvalidRequest, match=r"another model.*checkpoint_dir of its own"):
        folder.load(new_state(width=5), record)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointNotWritten, match=r"step 1 could not be written to .*/file/x"):
        CheckpointFolder(tmp_path / "file" / "x", FACTS, keep=1).save(new_state(), 1)


def test_going_on_with_another_number_of_shards_is_told(
    folder: CheckpointFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.save(new_state(), 1)
    other = CheckpointFolder(folder.folder, FACTS.model_copy(update={"shard_count": 4}), keep=2)
    with caplog.at_level(logging.WARNING):
        assert other.newest() is not None
    assert "shard_count=4" in caplog.text and "dealt out differently" in caplog.text
