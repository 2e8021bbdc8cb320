"""Traces are read, and wrong ones refused with the row, the column and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_gpu_provider.broker.model import RunType
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.simulation.trace import read_trace


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_csv_has_the_columns_that_it_needs(tmp_path: Path) -> None:
    text = (
        "task,arrives_s,gpus,model,memory,runtime_s.A100,runtime_s.V100,value,run_type,dag,task_class,preemptible\n"
        "late,60,2,A100|V100,16GiB,100,250,5,backfill,catalogue,recon,true\n"
        "early,0.5,,,,10,,,,,,\n"
    )
    early, late = read_trace(written(tmp_path, text))
    assert (early.id, early.arrives_s, early.request.gpus, early.run_type) == ("early", 0.5, 1, RunType.LIVE)
    assert (late.request.gpus, late.request.memory_mib, late.request.task_class) == (2, 16_384, "recon")
    assert late.request.models == {"A100", "V100"} and late.preemptible and late.dag_id == "catalogue"
    assert late.runtime_on(["A100", "V100"]) == 250 and late.run_type is RunType.BACKFILL


def test_json_lines_say_the_same(tmp_path: Path) -> None:
    text = (
        '{"arrives_s": 3, "runtime_s": {"A100": 10}, "model": ["A100"], "max_runtime": 20}\n'
        "\n"
        '{"arrives_s": 1, "runtime_s": 7}\n'
    )
    first, second = read_trace(written(tmp_path, text, "trace.jsonl"))
    assert (first.id, first.runtime_on(["T4"])) == ("task-2", 7)
    assert (second.runtime_on(["A100"]), second.request.max_runtime_s) == (10, 20)
    assert not second.knows("T4")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no tasks"),
        ("arrives_s,runtime_s\n", "has no tasks"),
        ("arrives_s,runtime_s\n0,60\nsoon,60\n", r"row 3, column arrives_s: 'soon' is not a number"),
        ("arrives_s,runtime_s\n-1,60\n", r"row 2, column arrives_s: '-1' is too small; the least is 0"),
        ("runtime_s\n60\n", r"row 2, column arrives_s: it is missing"),
        ("arrives_s,runtime_s\n0,\n", r"row 2, column runtime_s: it is empty.*runtime_s\.A100"),
        ("arrives_s,runtime_s\n0,0\n", r"row 2, column runtime_s: '0' is not above 0"),
        ("arrives_s,runtime_s.V100\n0,nan\n", r"row 2, column runtime_s\.V100: 'nan' is not a number"),
        ("arrives_s,runtime_s,gpus\n0,60,0\n", r"row 2: gpus='0' is too few"),
        ("arrives_s,runtime_s,memory\n0,60,16\n", r"row 2: memory: '16' is no size of memory"),
        (
            "arrives_s,runtime_s,run_type\n0,60,night\n",
            r"column run_type: 'night' is unknown; write live or backfill",
        ),
        ("arrives_s,runtime_s,preemptible\n0,60,maybe\n", r"column preemptible: 'maybe'.*true or false"),
        ("arrives_s,runtime_s,queue_timeout_s\n0,60,0\n", r"column queue_timeout_s: '0' is not above 0"),
        ("arrives_s,runtime_s,gpu\n0,60,1\n", r"row 2: there is no column 'gpu'; known are .*gpus"),
        ("arrives_s,runtime_s\n0,60,7\n", r"row 2: it has more cells"),
        ("task,arrives_s,runtime_s\na,0,60\na,1,60\n", r"row 3, column task: 'a' is there twice"),
    ],
)
def test_a_wrong_cell_is_named_by_row_and_column(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_trace(written(tmp_path, text))


@pytest.mark.parametrize("line", ["{", "[1]"])
def test_a_line_that_is_no_object_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidRequest, match=r"row 2: it is no"):
        read_trace(written(tmp_path, f'{{"arrives_s": 0, "runtime_s": 1}}\n{line}\n', "trace.jsonl"))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot be read: .*No such file"):
        read_trace(tmp_path / "absent.csv")
