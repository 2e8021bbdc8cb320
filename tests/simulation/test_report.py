"""The figures of a run, on cases worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.simulation import plot
from airflow_gpu_provider.simulation.policies import bind, chosen
from airflow_gpu_provider.simulation.report import load_curve, report
from tests.simulation.simulated import fleet, run, task

TWO = fleet({"a": ("A100", 2)})


def test_figures_of_three_tasks_on_two_devices() -> None:
    tasks = [task("a", 0, 100), task("b", 0, 300), task("c", 20, 100, dag_id="x")]
    result = run("ours", TWO, tasks)
    figures = report(result, TWO)
    assert (figures.tasks, figures.finished, figures.failed) == (3, 3, 0)
    assert figures.makespan_s == 300
    assert (figures.wait_p50_s, figures.wait_mean_s) == (0, pytest.approx(80 / 3))
    assert figures.completion_mean_s == pytest.approx((100 + 300 + 180) / 3)
    assert figures.utilisation == pytest.approx(500 / 600)
    assert figures.delayed == 1, "c waited 80 s, more than a minute"
    of_dag = report(result, TWO, lambda each: each.dag_id == "x")
    assert (of_dag.tasks, of_dag.makespan_s, of_dag.utilisation) == (1, 200, figures.utilisation)


@pytest.mark.parametrize(
    ("wait_s", "run_s", "delayed"), [(60, 50, 0), (61, 50, 1), (99, 1000, 0), (101, 1000, 1)]
)
def test_a_delay_is_more_than_a_minute_and_more_than_a_tenth_of_the_run(
    wait_s: float, run_s: float, delayed: int
) -> None:
    one = fleet({"a": ("A100", 1)})
    result = run("ours", one, [task("1st", 0, wait_s), task("2nd", 0, run_s)])
    assert report(result, one).delayed == delayed


def test_the_failed_count_apart_and_have_no_times() -> None:
    result = run("pools", TWO, [task("huge", 0, 10, gpus=3)])
    figures = report(result, TWO)
    assert (figures.failed, figures.delayed, figures.delayed_or_failed) == (1, 0, 1)
    assert figures.wait_p50_s is None and figures.completion_mean_s is None


def test_the_load_curve_keeps_the_area() -> None:
    result = run("ours", TWO, [task("a", 0, 100), task("b", 50, 300, gpus=2)])
    curve = load_curve(result, points=7)
    assert sum(share for _, share in curve) / len(curve) == pytest.approx(report(result, TWO).utilisation)
    assert load_curve(run("ours", TWO, [])) == []


def test_pools_get_equal_work_for_each_device() -> None:
    on = fleet({"a": ("A100", 2), "v": ("V100", 1)})
    tasks = [task(f"{dag}{number}", 0, 100, dag_id=dag) for dag in "xyz" for number in range(4)]
    bound = bind(tasks, on)
    assert sorted(kind.model for kind in bound.values()) == ["A100", "A100", "V100"]


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    assert [policy.name for policy in chosen("pools, ours,pools")] == ["pools", "ours"]
    with pytest.raises(InvalidRequest, match="'lifo'; write some of ours, measured, fifo"):
        chosen("ours,lifo")


@pytest.mark.parametrize("name", ["plot.png", "plot.svg", "plot.html"])
def test_a_plot_is_a_file_of_its_own(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    runs = {"ours": run("ours", TWO, [task("a", 0, 100), task("b", 50, 300, gpus=2)])}
    plot.save(tmp_path / name, runs, [{"policy": "<ours>"}], title="A & B")
    content = (tmp_path / name).read_bytes()
    assert content.startswith({"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype"}[name[5:]])
    if name.endswith("html"):
        text = content.decode()
        assert "<svg" in text and "&lt;ours&gt;" in text and "A &amp; B" in text
        assert "src=" not in text, "it needs no other file"


def test_a_plot_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match=r"ends in \.png, \.svg, \.html"):
        plot.check(tmp_path / "plot.gif")
    with pytest.raises(InvalidRequest, match="there is no folder"):
        plot.check(tmp_path / "absent" / "plot.png")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'airflow-gpu-provider\[plot\]'"):
        plot.check(tmp_path / "plot.png")
