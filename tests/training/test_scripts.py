"""Plain scripts, run as they are by real processes: rounds, restarts, causes and ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.failures import FailureCause
from airflow_gpu_provider.training.plan import RunPlan, Slot
from airflow_gpu_provider.training.respawns import RestartBudget
from airflow_gpu_provider.training.run_file import RunRecord, RunState
from airflow_gpu_provider.training.script import check_script_file, rank_environment, read_script
from airflow_gpu_provider.training.script_errors import error_at_the_start, error_in
from airflow_gpu_provider.training.script_silence import Silence
from tests.training.running import ROOT, Running, is_alive, make_plan
from tests.training.scripts.neighbour import STEPS, model, samples

SCRIPTS = ROOT / "tests/training/scripts"


@pytest.fixture
def scripted(training: Callable[..., Running]) -> Callable[..., Running]:
    """Return a function that starts a script with arguments."""

    def start(name: str, *args: str, **changes: Any) -> Running:
        script = read_script(name, args, dag_folder=SCRIPTS)
        return training(**{"entrypoint": None, "script": script, "max_respawns": 1, **changes})

    return start


def slot(device: str) -> Slot:
    return Slot(device_ids=(device,), environment={"CUDA_VISIBLE_DEVICES": device})


def expected_weights() -> dict[str, torch.Tensor]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in (0, 1):
            x, y = samples(step, rank)
            (mse_loss(net(x), y) / 2).backward()
        optimizer.step()
    return dict(net.state_dict())


def test_a_killed_rank_restarts_the_script_which_goes_on_from_its_checkpoint(
    scripted: Callable[..., Running],
) -> None:
    running = scripted("train.py", "--kill-at", "3")
    record = running.end()
    assert record.state is RunState.SUCCEEDED, running.logs()
    assert [(f.rank, f.cause) for f in record.failures] == [(1, FailureCause.KILLED)]
    assert record.script is not None and record.script.restarts == 1
    assert "rank 0 of 2 begins at 3, local rank 0" in running.plan.paths.log("u2").read_text()
    assert running.plan.paths.log("u3").read_text().endswith("done")
    folder = running.plan.checkpoint_dir
    assert not is_alive(int((folder / "helper").read_text())), "what a lost rank leaves behind is ended"
    weights = torch.load(folder / "newest.pt")["model"]
    for name, expected in expected_weights().items():
        torch.testing.assert_close(weights[name], expected)


def test_a_faulty_device_is_left_for_a_spare_one(scripted: Callable[..., Running]) -> None:
    slots = {"member_slots": (slot("GPU-a"), slot("GPU-b")), "spare_slots": (slot("GPU-c"),)}
    running = scripted("plain.py", "gpu", **slots)
    record = running.end()
    assert record.state is RunState.SUCCEEDED, running.logs()
    assert [f.cause for f in record.failures] == [FailureCause.GPU_FAULT]
    assert record.suspect_devices == ["GPU-b"]
    assert running.plan.paths.log("u1").read_text().startswith("devices 'GPU-b'")
    assert running.plan.paths.log("u3").read_text().startswith("devices 'GPU-c'")
    assert record.takeovers == ["restart 1 of all processes after the loss of u1; rank 1 moved to GPU-c"]


def test_a_stopped_rank_is_a_lost_one(scripted: Callable[..., Running]) -> None:
    record = scripted("plain.py", "stop").end()
    assert record.state is RunState.SUCCEEDED
    assert [(f.rank, f.cause) for f in record.failures] == [(1, FailureCause.HUNG)]


def test_restarts_end_where_nothing_new_is_saved(scripted: Callable[..., Running]) -> None:
    record = scripted("plain.py", "always").end()
    assert record.state is RunState.FAILED and not record.hopeless
    assert [f.evidence.split(";")[0] for f in record.failures] == ["exit code 3 without a report"] * 2
    for words in ("was started 2 times", "AGP_CHECKPOINT_DIR", "exit code 3"):
        assert words in str(record.error)


def test_restarts_go_on_as_long_as_something_new_is_saved(scripted: Callable[..., Running]) -> None:
    record = scripted("plain.py", "save").end()
    assert record.state is RunState.SUCCEEDED
    assert record.script is not None and record.script.restarts == 4


@pytest.mark.parametrize(
    ("how", "words", "rank"),
    [("raise", "KeyError: 'no such column: price'", None), ("network", "batch size 0", 1)],
)
def test_an_error_of_the_author_ends_the_run_and_is_told_before_its_consequences(
    scripted: Callable[..., Running], how: str, words: str, rank: int | None
) -> None:
    record = scripted("plain.py", how).end()
    assert record.state is RunState.FAILED and record.hopeless
    (failure,) = record.failures
    assert failure.cause is FailureCause.USER_ERROR and words in str(record.error)
    assert rank in (None, failure.rank)
    assert record.script is not None and record.script.restarts == 0


def test_a_script_that_python_cannot_begin_is_an_error_of_the_author_at_once(
    scripted: Callable[..., Running], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import os\ndef f(:\n    pass\n")
    for name, words in (
        ("-m nothing.here", "ModuleNotFoundError: 'nothing.here' (ModuleNotFoundError: No module named"),
        (str(broken), "SyntaxError: invalid syntax (File "),
    ):
        record = scripted(name).end()
        assert record.state is RunState.FAILED and record.hopeless, record
        assert words in str(record.error)
        assert record.script is not None and record.script.restarts == 0


@pytest.mark.parametrize(
    ("lines", "code", "error"),
    [
        (["/bin/python: No module named a.b"], 1, "ModuleNotFoundError"),
        (
            ["/bin/python: No module named a.__main__; 'a' is a package and cannot ..."],
            1,
            "ModuleNotFoundError",
        ),
        (
            ["/bin/python: can't open file '/a.py': [Errno 2] No such file or directory"],
            2,
            "FileNotFoundError",
        ),
        (['  File "/a.py", line 2', "    x", "IndentationError: unexpected indent"], 1, "IndentationError"),
        (["worker: No module named a.b", "exiting"], 1, None),
        (["usage: train.py [-h]", "train.py: error: no such option"], 2, None),
        (["SyntaxError: in a configuration"], 1, None),
        (["/bin/python: No module named a.b"], -9, None),
        ([], 1, None),
    ],
)
def test_what_python_says_of_a_script_that_it_cannot_begin_is_understood(
    lines: list[str], code: int, error: str | None
) -> None:
    report = error_at_the_start(lines, code)
    assert (report and report.error_type) == error


def test_a_run_in_which_nothing_moves_any_more_hangs(scripted: Callable[..., Running]) -> None:
    record = scripted("plain.py", "hang", stall_timeout_s=2, max_respawns=0).end()
    assert [(f.rank, f.cause) for f in record.failures] == [(1, FailureCause.HUNG)]
    assert "rank(s) 0 had ended before" in record.failures[0].evidence


def test_a_script_that_is_asked_to_stop_may_save_first(scripted: Callable[..., Running]) -> None:
    running = scripted("plain.py", "wait")
    logs = [running.plan.paths.log(uid) for uid in ("u0", "u1")]

    def both_wait(_: RunRecord) -> bool:
        return all(log.exists() and "waits" in log.read_text() for log in logs)

    running.until(both_wait, "both ranks to wait")
    os.kill(running.run.pid, signal.SIGTERM)
    record = running.end()
    assert record.state is RunState.STOPPED and record.failures == []


def test_a_script_on_a_shared_device_keeps_to_its_part(scripted: Callable[..., Running]) -> None:
    shared = Slot(environment={"GPU_MEMORY_LIMIT_MIB": "8704"})
    running = scripted("limited.py", member_slots=(shared, Slot()))
    assert running.end().state is RunState.SUCCEEDED, running.logs()
    said = running.plan.paths.log("u0").read_text()
    assert said.splitlines() == ["imported: []", "used: [(0.25, 0)]", "in a child: [(0.25, 0)]"]
    assert "used: []" in running.plan.paths.log("u1").read_text()


# -- without processes


def test_a_script_that_saves_and_fails_each_time_comes_to_an_end() -> None:
    budget = RestartBudget(2)
    for saved_at in range(20):
        assert budget.left(saved_at, lasted_s=60) > 0 and budget.is_saving(saved_at)
        budget.spend(saved_at, lasted_s=60)
    assert budget.left(20, lasted_s=60) == 0 and budget.is_saving(20)
    assert budget.left(20, lasted_s=600) == 2, "it did train for a while"
    budget.spend(20, lasted_s=600)
    budget.spend(20, lasted_s=600)
    assert budget.left(20, lasted_s=600) == 0 and not budget.is_saving(20)


@pytest.mark.parametrize(
    ("script", "args", "words"),
    [
        ("torchrun train.py", None, "name the Python file alone"),
        ("python3.11 train.py", None, "name the Python file alone"),
        ("train.py --lr 1", None, r"script='train.py', script_args=\['--lr', '1'\]"),
        ("train", None, "neither a Python file"),
        ("", None, "name a file"),
        ("train.py", "--lr 1", "write a list"),
        ("train.py", [None], "script_args holds None"),
    ],
)
def test_a_script_that_cannot_be_meant_is_refused(script: str, args: object, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_script(script, args, dag_folder=SCRIPTS)


def test_a_relative_path_starts_at_the_folder_of_the_dag() -> None:
    script = read_script("train.py", ["--lr", 0.1], dag_folder=SCRIPTS)
    assert script.command == (str(SCRIPTS / "train.py"), "--lr", "0.1") and script.folder == SCRIPTS
    check_script_file(script)
    assert read_script("-m my.train", (), dag_folder=SCRIPTS).command == ("-m", "my.train")
    with pytest.raises(
        InvalidRequest, match=r"no file .*trian\.py; .* has limited\.py, neighbour\.py, plain\.py, train\.py"
    ):
        check_script_file(read_script("trian.py", (), dag_folder=SCRIPTS))


def test_each_rank_is_alone_with_its_device_on_a_node_of_its_own(tmp_path: Any) -> None:
    plan = make_plan(tmp_path, entrypoint=None, script=read_script("train.py", (), dag_folder=SCRIPTS))
    variables = rank_environment(plan, rank=1, port=29500, restarts=2)
    wanted = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
    wanted |= {"MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": plan.run_id}
    assert wanted.items() <= variables.items()


def test_a_plan_has_either_a_function_or_a_script(tmp_path: Any) -> None:
    plan = make_plan(tmp_path).model_dump()
    for wrong in ({"entrypoint": None}, {"script": read_script("train.py", (), dag_folder=SCRIPTS)}):
        with pytest.raises(ValueError, match="either an entrypoint or a script"):
            RunPlan.model_validate({**plan, **wrong})


def test_the_last_traceback_is_found_behind_the_rank_that_torch_puts_before_it() -> None:
    text = (
        "Traceback (most recent call last):\n  File 'x'\nKeyError: 1\n\nDuring handling ...\n\n"
        "[rank1]: Traceback (most recent call last):\n[rank1]:   File 'y'\n"
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n[rank1]: Tried to allocate\n\nW1130 more\n"
    )
    report = error_in(text.splitlines())
    assert report is not None
    assert (report.error_type, report.message) == (
        "OutOfMemoryError",
        "CUDA out of memory.\nTried to allocate",
    )
    assert error_in(["no error", "at all"]) is None


def test_a_rank_that_computes_or_saves_or_prints_is_not_silent() -> None:
    silence = Silence(0.0)
    silence.look(10.0, cpu_s={0: 0.1, 1: 0.1}, output_bytes=0, saved_at_ns=0)
    assert silence.lasts_for(10.0) == 10, "a hundredth of a processor is no work"
    silence.look(11.0, cpu_s={0: 0.1, 1: 0.8}, output_bytes=0, saved_at_ns=0)
    assert silence.lasts_for(11.0) == 0
    silence.look(12.0, cpu_s={0: 0.1, 1: 0.8}, output_bytes=1, saved_at_ns=0)
    silence.look(13.0, cpu_s={0: 0.1, 1: 0.8}, output_bytes=1, saved_at_ns=9)
    silence.look(20.0, cpu_s={0: 0.1, 1: 0.8}, output_bytes=1, saved_at_ns=9)
    assert silence.lasts_for(20.0) == 7
