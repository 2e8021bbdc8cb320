"""NCCL and streams under `ShardGroup`, `TrainingState` and `Telemetry`, in this process, on one GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from airflow_gpu_provider.training.coordination import Control, host_store
from airflow_gpu_provider.training.pulse import Pulse
from airflow_gpu_provider.training.shard_group import GroupLost, ShardGroup
from airflow_gpu_provider.training.state import TrainingState
from airflow_gpu_provider.training.telemetry import Telemetry
from tests.training.running import make_plan

pytestmark = pytest.mark.gpu

_LONG = 2_000_000_000  #: cycles of the device, about a second


class Alone:
    """A group of one rank, with its pulse set by hand instead of by a supervisor."""

    def __init__(self, folder: Path) -> None:
        self.store, _ = host_store()
        self.pulse = Pulse("u0", self.store, interval_s=1.0)
        plan = make_plan(folder, shards=1, backend="nccl", sync_timeout_s=60.0)
        self.group = ShardGroup("u0", self.store, self.pulse, plan)

    def join(self, generation: int) -> None:
        self.pulse.control = Control(generation, {"u0": 0})
        self.group.join(self.pulse.control)

    def move_on(self, generation: int) -> None:
        self.pulse.control = Control(generation, {"u0": 0})


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    torch.cuda.set_device(0)
    made = Alone(tmp_path)
    yield made
    made.group.leave()
    torch.cuda.synchronize()


def test_a_group_is_aborted_and_made_anew(alone: Alone) -> None:
    for generation in range(3):
        alone.join(generation)
        flats = {torch.float32: torch.full((1024,), 3.0, device="cuda")}
        alone.group.average(flats)
        assert flats[torch.float32].tolist() == [3.0] * 1024
        assert alone.group.gather([generation]) == [[generation]], "words go through gloo beside it"


def test_a_collective_that_does_not_end_is_given_up_and_the_next_group_works(alone: Alone) -> None:
    alone.join(0)
    flat = torch.ones(1024, device="cuda")
    alone.group.broadcast(flat, 0)  # the communicator is made with the first collective
    torch.cuda._sleep(_LONG)  # the collective waits behind it, as behind a rank that is lost
    alone.move_on(1)
    with pytest.raises(GroupLost, match="during a collective"):
        alone.group.broadcast(flat, 0)
    alone.join(1)
    again = torch.ones(1024, device="cuda")
    alone.group.average({torch.float32: again})
    assert again.sum().item() == 1024


def test_the_state_goes_through_buffers_on_the_device_bit_by_bit() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    state = TrainingState([net], [optimizer])
    net(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    flats = state.pack(torch.device("cuda"))
    before, snapshot = state.digest(), state.snapshot(1, flats)
    optimizer.step()
    assert state.digest() != before
    state.restore(snapshot)
    assert state.digest() == before
    on_host = TrainingState([net.cpu()], [torch.optim.AdamW(net.parameters(), lr=0.1)])
    on_host.restore(snapshot)
    assert on_host.digest() == before, "the same bits in the host's memory"


def test_reporting_a_loss_does_not_wait_for_the_device(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path / "t.jsonl", "u0")
    stream = torch.cuda.Stream(priority=-1)
    with torch.cuda.stream(stream):
        loss = torch.ones((), device="cuda")
        torch.cuda._sleep(_LONG)
        loss = loss * 2
        done = torch.cuda.Event()
        done.record(stream)
        telemetry.report(0, 0, {"loss": loss})
        assert not done.query(), "the device is still at work"
    done.synchronize()
    telemetry.flush()
    assert json.loads((tmp_path / "t.jsonl").read_text().splitlines()[0])["loss"] == 2.0
