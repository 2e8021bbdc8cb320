"""How fast shards are and who keeps the others waiting: one slow step names nobody, a slow shard is named."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_provider.operators.training_progress import pace_in_words
from airflow_gpu_provider.operators.training_result import training_result
from airflow_gpu_provider.training.children import Children
from airflow_gpu_provider.training.failures import FailureCause
from airflow_gpu_provider.training.line_file import LineFile, keep_newest_files
from airflow_gpu_provider.training.liveness import Liveness
from airflow_gpu_provider.training.measurements import read_telemetry
from airflow_gpu_provider.training.membership import Membership
from airflow_gpu_provider.training.meter import HostClock, Meter
from airflow_gpu_provider.training.observer import Observer
from airflow_gpu_provider.training.pace import Counters, Paces
from airflow_gpu_provider.training.plan import Slot
from airflow_gpu_provider.training.run_file import RunRecord, RunState
from tests.training.oracle import expected_weights
from tests.training.running import Running, make_plan

USUAL_S = 0.1


def feed(paces: Paces, seconds: Sequence[Sequence[float]], *, holders: dict[int, str] | None = None) -> None:
    """Let each second bring ten steps of the given own time a shard; all take as long as the slowest."""
    shards = len(seconds[0])
    counters = {rank: Counters() for rank in range(shards)}
    holders = holders or {rank: f"u{rank}" for rank in range(shards)}
    paces.take(counters, holders=holders, now=0.0)
    now = 0.0
    for own_s in seconds:
        now += max(1.001, 10 * max(own_s))
        counters = {
            rank: before.model_copy(
                update={
                    "steps": before.steps + 10,
                    "own_s": before.own_s + 10 * own_s[rank],
                    "shared_s": before.shared_s + 10 * (max(own_s) - own_s[rank]),
                }
            )
            for rank, before in counters.items()
        }
        assert paces.take(counters, holders=holders, now=now) is not None


@given(
    noise=st.lists(st.lists(st.floats(0.9, 1.1), min_size=3, max_size=3), min_size=1, max_size=12),
    at=st.integers(0, 11),
    rank=st.integers(0, 2),
    factor=st.floats(1, 1000),
)
def test_one_slow_second_names_nobody(noise: list[list[float]], at: int, rank: int, factor: float) -> None:
    seconds = [[USUAL_S * each for each in row] for row in noise]
    seconds[at % len(seconds)][rank] *= factor
    paces = Paces()
    feed(paces, seconds)
    assert paces.straggler is None


@given(
    noise=st.lists(st.lists(st.floats(0.95, 1.05), min_size=3, max_size=3), min_size=4, max_size=12),
    rank=st.integers(0, 2),
    factor=st.floats(1.5, 100),
    machine=st.floats(0.1, 10),
)
def test_a_shard_that_is_always_slower_is_named_whatever_all_of_them_suffer(
    noise: list[list[float]], rank: int, factor: float, machine: float
) -> None:
    seconds = [[USUAL_S * each for each in row] for row in noise]
    for row in seconds:
        row[rank] *= factor
    seconds[-1] = [own * machine for own in seconds[-1]]
    paces = Paces()
    feed(paces, seconds)
    assert paces.straggler is not None and paces.straggler.rank == rank
    assert paces.straggler.factor == pytest.approx(factor, rel=0.15)


def test_a_straggler_that_recovers_is_one_no_longer_and_a_new_holder_begins_anew() -> None:
    paces = Paces()
    feed(paces, [[0.1, 0.2]] * 5)
    assert paces.straggler is not None and paces.straggler.others_s == pytest.approx(0.1)
    feed(paces, [[0.1, 0.2]] * 3, holders={0: "u0", 1: "u2"})
    assert paces.straggler is None, "three seconds of another process are not enough"
    feed(paces, [[0.1, 0.2]] * 7 + [[0.1, 0.1]] * 4, holders={0: "u0", 1: "u3"})
    assert paces.straggler is None


def test_bus_bandwidth_counts_what_crosses_the_links() -> None:
    paces = Paces()
    begin = {rank: Counters() for rank in range(4)}
    after = {
        rank: Counters(
            steps=10, own_s=1, shared_s=0.1, collectives=10, collective_s=slow, size_bytes=10_000_000
        )
        for rank, slow in enumerate((0.9, 0.5, 0.1, 0.9))
    }
    holders = {rank: f"u{rank}" for rank in range(4)}
    paces.take(begin, holders=holders, now=0.0)
    sample = paces.take(after, holders=holders, now=2.0)
    assert sample is not None and sample.collective_s == pytest.approx(0.01), "who came last waited for none"
    assert sample.bus_bytes_per_s == pytest.approx(1_000_000 / 0.01 * 2 * 3 / 4)
    assert (sample.bytes_per_s, sample.samples_per_s) == (5_000_000, None)


def test_the_meter_parts_own_work_from_waiting() -> None:
    class Steps(HostClock):
        now = 0.0

        def mark(self) -> float:
            return self.now

    clock = Steps()
    meter = Meter(clock)
    clock.now = 3.0
    with meter.collective(100):
        clock.now = 4.0
    clock.now = 4.5  # the optimizer's step
    meter.end(1)
    clock.now = 10.0  # a checkpoint is nobody's step
    meter.begin()
    clock.now = 12.0
    meter.arrive()
    clock.now = 14.0  # others are slower
    for _ in range(2):
        with meter.collective(50):
            clock.now += 0.25
    meter.end(5)
    counters = meter.counters
    assert (counters.steps, counters.own_s, counters.shared_s) == (6, 5.5, 3.5)
    assert (counters.collectives, counters.collective_s, counters.size_bytes) == (3, 1.5, 200)


def test_measurements_never_fill_the_disk(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "u0.jsonl", max_bytes=1000)
    for number in range(500):
        file.append([{"at": number, "kind": "report"}])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2100
    assert [line["at"] for line in read_telemetry(tmp_path)][-20:] == list(range(480, 500))
    for number in range(9):
        (tmp_path / f"v{number}.jsonl").write_text("")
    keep_newest_files(tmp_path, 4)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_straggler_and_a_stall_are_named_and_the_run_tells_how_it_went(
    training: Callable[..., Running],
) -> None:
    running = training(
        sync_interval=2,
        params={"steps": 160, "pause_s": 0.03, "slow": 3, "sleep_at": 120},
        stall_timeout_s=8,
        checkpoint_every_s=1.0,
    )
    slow = running.until(lambda record: record.straggler is not None, "a straggler")
    assert slow.straggler is not None and slow.straggler.rank == 1 and slow.straggler.factor > 1.3
    assert slow.notes[-1].sentence.startswith("Straggler: shard 1 (u1) on the CPU computes ")
    assert slow.pace is not None and slow.pace.loss is not None and slow.pace.gradient_norm is not None
    assert slow.pace.shards[0].waiting_pct > slow.pace.shards[1].waiting_pct, "it waits least"
    assert "samples/s, waiting" in pace_in_words(slow) and "s old" in pace_in_words(slow)
    record = running.end()
    assert record.state is RunState.SUCCEEDED and record.failures == []
    stalls = [note.sentence for note in record.notes if note.sentence.startswith("Stalled: ")]
    assert len(stalls) == 1 and "shard 0 (u0) on the CPU computes at step 120" in stalls[0]
    summary = training_result(record)["summary"]
    assert summary["samples_per_s"] > 0 and summary["allreduce_ms"] > 0 and summary["checkpoints"] >= 2
    assert 0 < summary["goodput_pct"] < 90, "the stall is time lost"

    lines = list(read_telemetry(running.plan.paths.telemetry))
    gauges = [line for line in lines if line["kind"] == "gauge" and "steps_per_s" in line]
    assert {line["shard"] for line in gauges} == {0, 1}
    for name in ("loss", "gradient_norm", "samples_per_s", "cpu_cores", "memory_mib", "bus_mib_per_s"):
        assert any(isinstance(line[name], float) for line in gauges), name
    of_run = [line for line in lines if line["kind"] == "run"]
    assert any(line["straggler"] == 1 and line["checkpoint_age_s"] is not None for line in of_run)
    json.dumps(lines, allow_nan=False)


def test_a_stalled_synchronisation_names_the_shard_that_is_not_heard_of_any_more(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, stall_timeout_s=100, member_slots=(Slot(), Slot(device_ids=("GPU-b",))))
    plan.paths.create()
    children = Children(plan, plan.paths.plan, None, address="", prefix="")
    children._children["u1"] = SimpleNamespace(slot=plan.member_slots[1])  # type: ignore[assignment]
    now = datetime.now(timezone.utc)
    record = RunRecord(run_id="r", pid=1, step=20, started_at=now, updated_at=now)
    observer, liveness = Observer(plan, children, record), Liveness(plan)
    for uid in ("u0", "u1"):
        liveness.watch(uid, 0.0)
    for second in range(60):
        for uid in ("u0", "u1") if second < 5 else ("u0",):
            liveness.hear(
                uid, beat=second + 1, phase="waiting", step=29, version=20, now=float(second), memory_mib=None
            )
        observer.observe({}, Membership.first(("u0", "u1"), ()), liveness, float(second))
    assert record.stall is not None
    assert (record.stall.rank, record.stall.uid, record.stall.device_ids) == (1, "u1", ("GPU-b",))
    (note,) = record.notes
    assert note.sentence.startswith("Stalled: all shards wait in the synchronisation after step 20")
    assert "Nothing is heard of shard 1 (u1) on GPU-b since" in note.sentence


@pytest.mark.parametrize(
    ("sync_interval", "words"),
    [
        (10, "weights of shard 1 are not finite after step 19"),
        (1, "gradients of shard 1 are not finite at step 19"),
    ],
)
def test_numbers_that_are_not_finite_end_the_run_before_they_are_shared(
    training: Callable[..., Running], sync_interval: int, words: str
) -> None:
    record = training(sync_interval=sync_interval, params={"nan_gradient_at": 19}).end()
    assert record.state is RunState.FAILED and record.hopeless
    assert words in str(record.error)
    assert [(failure.rank, failure.step) for failure in record.failures] == [(1, 19)]


def test_a_shard_stopped_inside_a_collective_is_replaced_bitwise(training: Callable[..., Running]) -> None:
    # Shard 0 takes long over step 24, so shard 1 is in the AllReduce of step 25 meanwhile.
    running = training(spares=1, sync_interval=1, params={"sleep_at": 24})
    running.until_step(25)
    time.sleep(1.0)
    running.hurt(1, signal.SIGSTOP)
    record = running.end()
    ((rank, step, cause),) = [(each.rank, each.step, each.cause) for each in record.failures]
    assert (rank, step, cause) == (1, 25, FailureCause.HUNG)
    assert "stopped by a signal" in record.failures[0].evidence
    assert record.checkpoint is not None
    assert record.checkpoint.state_sha256 == expected_weights(1)
