"""A script as a training task: what is refused when, what it tells, and what it returns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.launchers.local import LocalLauncher
from airflow_gpu_provider.operators.run_report import StepsSeen, report_run
from airflow_gpu_provider.operators.script_output import ScriptOutput
from airflow_gpu_provider.operators.training import DistributedTrainingOperator
from airflow_gpu_provider.operators.training_plan import plan_training
from airflow_gpu_provider.operators.training_progress import ProgressLog
from airflow_gpu_provider.operators.training_result import training_result
from airflow_gpu_provider.training.run_folder import RunFolder
from tests.operators.test_training_operator import ENTRYPOINT, context
from tests.training.running import ROOT

SCRIPTS = ROOT / "tests/training/scripts"


@dataclass
class Device:
    """A simulated device."""

    id: str
    simulated: bool = True
    memory_mib: int = 40_960
    milli: int = 1000
    memory_limit_mib: int | None = None
    node: str = "n1"
    host: str = "h1"


@dataclass
class Lease:
    """A lease that is told how its run went."""

    devices: tuple[Device, ...]
    spares: tuple[Device, ...] = ()
    lease_id: str = "lease-1"
    latency_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    told: tuple[int, list[str | None]] | None = None

    def report_failed_device(self, device_id: str) -> None:
        self.failed.append(device_id)

    def report_shards(self, count: int, *, failed_on: list[str | None]) -> None:
        self.told = (count, failed_on)


def operator(**arguments: Any) -> DistributedTrainingOperator:
    return DistributedTrainingOperator(task_id="train", **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "not neither"),
        ({"entrypoint": ENTRYPOINT, "script": "train.py"}, "not both"),
        ({"entrypoint": ENTRYPOINT, "script_args": ["--lr"]}, "train_params="),
        ({"script": "torchrun train.py"}, "name the Python file alone"),
        ({"script": "train.py", "script_args": "--lr 1"}, "write a list"),
        ({"entrypoint": ENTRYPOINT, "launcher": "kubernetes"}, "does not exist yet"),
        ({"entrypoint": ENTRYPOINT, "launcher": "slurm"}, "allowed are 'auto' and 'local'"),
    ],
)
def test_mistakes_are_refused_when_the_dag_is_read(arguments: Mapping[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        operator(**arguments)


def test_a_script_that_is_not_beside_its_dag_is_missed_when_the_dag_is_read() -> None:
    with DAG("there"):
        operator(script="../training/scripts/train.py")
    with DAG("missing"), pytest.raises(InvalidRequest, match=r"no file .*/tests/operators/train\.py"):
        operator(script="train.py", script_args=["{{ ds }}"])
    with DAG("absolute"):
        elsewhere = operator(script="/data/train.py")
    with pytest.raises(InvalidRequest, match=r"no file /data/train\.py"):
        elsewhere.claim_body(context())  # before a GPU is asked for


def test_what_the_ranks_print_is_told_with_the_rank_and_the_xcom_says_how_it_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lease = Lease((Device("GPU-0"), Device("GPU-1")), (Device("GPU-2"),))
    training = operator(
        script=str(SCRIPTS / "plain.py"),
        script_args=["gpu"],
        gpus=2,
        checkpoint_dir=str(tmp_path),
        redundancy=0.5,
    )
    held: Any = lease
    plan = plan_training(training, context(), held, RunFolder(tmp_path))
    run = LocalLauncher().start(plan)
    progress = ProgressLog(run, plan.paths, training.log, output=ScriptOutput.of(plan, training.log))
    record = progress.follow()
    progress.end()
    assert record is not None
    report_run(record, StepsSeen(), plan, held)
    result = training_result(record)
    assert json.loads(json.dumps(result)) == {
        "checkpoint_dir": str(tmp_path / "checkpoints"),
        "restarts": 1,
        "failures": [
            "shard 1 (u1) failed: gpu_fault: RuntimeError: CUDA error: an illegal memory access "
            "was encountered"
        ],
    }
    told = capsys.readouterr().out
    assert told.count("[rank 1] devices ''") == 2 and "[rank 0] devices ''" in told
    assert "restart 1 of all processes" in told
    assert lease.failed == ["GPU-1"] and lease.told == (2, ["n1"]), "the device is reported"


def test_output_is_told_once_in_whole_lines_and_never_all_of_a_flood(tmp_path: Path) -> None:
    told: list[str] = []

    class Log:
        def info(self, text: str, *values: object) -> None:
            told.append(text % values)

    output = ScriptOutput(tmp_path, 2, Log())  # type: ignore[arg-type]
    file = tmp_path / "u3.log"
    file.write_text("epoch 1\n 10 %\r 50 %")
    output.tell()
    assert told == ["[rank 1] epoch 1"]
    with file.open("a") as more:
        more.write("\r100 %\nlast words")
    output.tell()
    output.end()
    assert told[1:] == ["[rank 1] 100 %", "[rank 1] last words"]
    told.clear()
    (tmp_path / "u4.log").write_text("".join(f"{number}\n" for number in range(1000)))
    output.tell()
    assert told[0] == "[rank 0] ... 800 lines left out" and told[1] == "[rank 0] 800" and len(told) == 201
