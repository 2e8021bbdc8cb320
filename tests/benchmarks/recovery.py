"""What a fault costs a training run: seconds to the next synchronisation, samples, bits of the weights.

Run ``python -m tests.benchmarks.recovery --fault kill --runs 5 --json`` for single faults, with ``--soak 120
--every 5`` for one fault after the other. Real runs of the product's launcher on the CPU, hurt by real
signals; every run is compared with one of the same session that nothing happened to.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from airflow_gpu_provider.training.measurements import read_telemetry
from airflow_gpu_provider.training.run_file import RunRecord, RunState
from tests.benchmarks.output import show
from tests.benchmarks.worker_loss import measure_worker_loss
from tests.training.running import Running, make_plan, start

FAULTS = ("kill", "stop", "oom", "supervisor", "worker")
GIVE_UP_S = 600.0
PAUSE_S = 0.01
STEP_S = 0.015  #: what a step with its pause takes here
SETTLE_S = 1.5  #: after the spare is warm, so that starting it disturbs nothing


@dataclass(frozen=True)
class Shape:
    """The run that is hurt."""

    shards: int
    spares: int
    sync_interval: int
    steps: int


@dataclass(frozen=True)
class Outcome:
    """One run that was hurt once."""

    fault_to_first_sync_s: float
    weights: str
    lost_samples: int
    repeated_samples: int
    causes: list[str]


def begin(folder: Path, shape: Shape, *, attempt: str = "try-1", **changes: Any) -> Running:
    """Start a run as the operator would, with its defaults for everything that matters here."""
    return start(
        make_plan(
            folder,
            shards=shape.shards,
            spares=shape.spares,
            attempt=attempt,
            sync_interval=shape.sync_interval,
            entrypoint="tests.benchmarks.training_workload:train",
            params={"steps": shape.steps, "pause_s": PAUSE_S, "oom_file": str(folder / "oom")},
            **{"max_respawns": 2, "checkpoint_every_s": 30.0, **changes},
        )
    )


def until_warm(running: Running, shape: Shape) -> RunRecord:
    """Return once the run trains and all its spares wait warm."""

    def is_warm(record: RunRecord) -> bool:
        return record.step >= 2 * shape.sync_interval and len(record.warm) >= shape.spares

    running.until(is_warm, "warm spares")
    time.sleep(SETTLE_S)
    return running.until(is_warm, "warm spares")


def hurt(running: Running, fault: str, rank: int) -> float:
    """Do it and return when (of `time.time`)."""
    if fault == "oom":
        order = Path(str(running.plan.params["oom_file"]))
        order.with_suffix(".new").write_text(str(rank))
        order.with_suffix(".new").replace(order)
        while order.exists():
            time.sleep(0.001)
        return float(order.with_suffix(".at").read_text())
    pid = running.supervisor() if fault == "supervisor" else running.pid_of_rank(rank)
    at = time.time()
    os.kill(pid, signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    return at


def first_sync(running: Running, *, after: float, generation: int) -> float:
    """Return when all shards had shared their state again, in a generation later than ``generation``."""
    syncs = [
        line
        for line in read_telemetry(running.plan.paths.telemetry)
        if line["kind"] == "sync" and line["at"] > after and line["generation"] > generation
    ]
    first = min(syncs, key=lambda line: line["at"])
    return max(
        line["at"]
        for line in syncs
        if (line["step"], line["generation"]) == (first["step"], first["generation"])
    )


def end(running: Running) -> RunRecord:
    """Return the record of a run that has to succeed."""
    record = running.end(give_up_s=GIVE_UP_S)
    if record.state is not RunState.SUCCEEDED:
        raise SystemExit(f"The run did not succeed: {record.error}\n{running.logs()}")
    return record


def undisturbed(folder: Path, shape: Shape) -> tuple[Running, RunRecord]:
    """Return a run that nothing happened to."""
    running = begin(folder, shape)
    return running, end(running)


def single(folder: Path, shape: Shape, fault: str, rank: int) -> Outcome:
    """Hurt one run once."""
    running = begin(folder, shape, checkpoint_every_s=2.0 if fault == "supervisor" else 30.0)
    try:
        before = until_warm(running, shape)
        at = hurt(running, fault, rank)
        record = end(running)
        synced_at = first_sync(running, after=at, generation=before.generation)
    finally:
        running.run.kill()
    return _outcome(record, synced_at - at)


def _outcome(record: RunRecord, seconds: float) -> Outcome:
    assert record.checkpoint is not None and isinstance(record.result, dict)
    return Outcome(
        fault_to_first_sync_s=round(seconds, 3),
        weights=record.checkpoint.state_sha256,
        lost_samples=int(str(record.result["lost_samples"])),
        repeated_samples=int(str(record.result["repeated_samples"])),
        causes=[failure.cause.value for failure in record.failures],
    )


def measure_single(shape: Shape, fault: str, runs: int) -> dict[str, Any]:
    """Hurt several runs, each rank in turn."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="recovery-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        _, reference = undisturbed(folder / "reference", shape)
        assert reference.checkpoint is not None
        for number in range(runs):
            outcomes.append(single(folder / f"run-{number}", shape, fault, number % shape.shards))
    times = [outcome.fault_to_first_sync_s for outcome in outcomes]
    return {
        "fault": fault,
        **asdict(shape),
        "runs": runs,
        "fault_to_first_sync_s": round(statistics.median(times), 3),
        "all_fault_to_first_sync_s": times,
        "bitwise_equal": {outcome.weights for outcome in outcomes} == {reference.checkpoint.state_sha256},
        "lost_samples": sum(outcome.lost_samples for outcome in outcomes),
        "repeated_samples": sum(outcome.repeated_samples for outcome in outcomes),
        "causes": sorted({cause for outcome in outcomes for cause in outcome.causes}),
        "means": MEANING.get(fault, "a spare takes the rank over in the same run"),
    }


def measure_worker(shape: Shape, runs: int) -> dict[str, Any]:
    """Kill the Airflow worker of several trainings."""
    with tempfile.TemporaryDirectory(prefix="recovery-", ignore_cleanup_errors=True) as scratch:
        measured = measure_worker_loss(Path(scratch), runs=runs, pause_s=PAUSE_S, **asdict(shape))
    return {"fault": "worker", **asdict(shape), "runs": runs, **measured, "means": MEANING["worker"]}


#: What happened in between
MEANING = {
    "supervisor": "another supervisor and new shards go on from the last checkpoint, in the same attempt and "
    "under the same lease; the steps since the checkpoint are done again",
    "worker": "the training goes on under its keeper; the next try of the task goes on with it",
}


def measure_soak(shape: Shape, fault: str, seconds: float, every: float) -> dict[str, Any]:
    """Hurt one run over and over; compare with one that is left alone."""
    with tempfile.TemporaryDirectory(prefix="recovery-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        alone, reference = undisturbed(folder / "reference", shape)
        alone_s = trained_s(alone)
        running = begin(folder / "soak", shape)
        try:
            faults = torment(running, shape, fault, seconds=seconds, every=every)
            record = end(running)
        finally:
            running.run.kill()
        hurt_s = trained_s(running)
    outcome = _outcome(record, 0.0)
    assert reference.checkpoint is not None
    return {
        "soak_s": seconds,
        "every_s": every,
        "fault": fault,
        **asdict(shape),
        "faults": faults,
        "takeovers": len(record.takeovers),
        "bitwise_equal": outcome.weights == reference.checkpoint.state_sha256,
        "lost_samples": outcome.lost_samples,
        "repeated_samples": outcome.repeated_samples,
        "goodput_pct": round(100 * alone_s / hurt_s, 1),
        "trained_s": round(hurt_s, 1),
        "trained_alone_s": round(alone_s, 1),
    }


def torment(running: Running, shape: Shape, fault: str, *, seconds: float, every: float) -> int:
    """Hurt one rank after the other for some seconds, warm spares or not; return how often."""
    until_warm(running, shape)
    count = 0
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        time.sleep(max(0.0, began + count * every - time.monotonic()))
        if is_through(running, shape):
            break
        rank = count % shape.shards
        running.until(partial(_is_held, running, rank), f"a holder of rank {rank}")
        hurt(running, fault, rank)
        count += 1
    return count


def _is_held(running: Running, rank: int, record: RunRecord) -> bool:
    """Say whether a rank has a holder that lives; the record may be half a second old."""
    return any(held == rank and uid in running.pids() for uid, held in record.members.items())


def is_through(running: Running, shape: Shape) -> bool:
    record = running.run.record()
    return record is not None and record.step >= shape.steps - 2 * shape.sync_interval


def trained_s(running: Running) -> float:
    """Return the seconds from the first to the last synchronisation."""
    times = [line["at"] for line in read_telemetry(running.plan.paths.telemetry) if line["kind"] == "sync"]
    return float(max(times) - min(times))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", choices=FAULTS, default="kill")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--sync-interval", type=int, default=10)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="default: some seconds, or as long as the soak")
    parser.add_argument("--soak", type=float, help="seconds of one fault after the other")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two faults of a soak")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    usual_s = 20.0 if options.fault == "worker" else 6.0  # the next try takes some seconds to start
    steps = options.steps or int((options.soak or usual_s) / STEP_S)
    shape = Shape(options.shards, options.spares, options.sync_interval, steps)
    if options.fault == "worker":
        if options.soak:
            parser.error("--soak hurts shards; --fault worker is a single fault")
        result = measure_worker(shape, options.runs)
    elif options.soak:
        result = measure_soak(shape, options.fault, options.soak, options.every)
    else:
        result = measure_single(shape, options.fault, options.runs)
    show(result, as_json=options.json)


if __name__ == "__main__":
    main()
