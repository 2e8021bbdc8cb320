from __future__ import annotations

from typing import Any

import pytest

from airflow_gpu_provider.broker.model import GpuRequest
from airflow_gpu_provider.broker.request import build_request
from airflow_gpu_provider.exceptions import InvalidRequest


def test_nothing_said_is_one_device_of_any_kind() -> None:
    assert build_request() == GpuRequest()


def test_all_wishes_arrive_in_the_request() -> None:
    built = build_request(
        gpus=2,
        memory="40GiB",
        model="NVIDIA A100-SXM4-80GB|h100",
        min_tflops=35,
        strict=True,
        cpu_cores=8,
        host_memory="64GiB",
        host="gpu-1",
        spares=1,
        max_runtime=3600,
    )
    assert built == GpuRequest(
        gpus=2,
        models=frozenset({"A100", "H100"}),
        memory_mib=40_960,
        min_tflops=35.0,
        strict=True,
        cpu_cores=8.0,
        host_memory_mib=65_536,
        host="gpu-1",
        spares=1,
        max_runtime_s=3600.0,
    )


@pytest.mark.parametrize(
    ("wish", "milli"),
    [
        ({}, 1000),
        ({"share": None}, 1000),
        ({"share": ""}, 1000),
        ({"shared": True}, 1),
        ({"share": 0.25}, 250),
        ({"share": "0.25", "shared": "True"}, 250),
        ({"share": 0.0001}, 1),
    ],
)
def test_a_share_is_by_memory_or_at_least_a_part(wish: dict[str, Any], milli: int) -> None:
    assert build_request(memory="8GiB", **wish) == GpuRequest(memory_mib=8192, milli=milli)


def test_rendered_templates_come_as_text_and_are_read() -> None:
    built = build_request(
        gpus="2", min_tflops="35", strict="True", cpu_cores="1.5", spares="1", max_runtime="60"
    )
    assert built == GpuRequest(
        gpus=2, min_tflops=35.0, strict=True, cpu_cores=1.5, spares=1, max_runtime_s=60.0
    )


@pytest.mark.parametrize("nothing", [None, ""])
def test_an_empty_wish_is_no_wish(nothing: str | None) -> None:
    built = build_request(
        memory=nothing,
        model=nothing,
        min_tflops=nothing,
        host_memory=nothing,
        host=nothing,
        max_runtime=nothing,
    )
    assert built == GpuRequest()


@pytest.mark.parametrize("models", [["A100", "H100"], ("A100", "H100"), " A100 | H100 "])
def test_several_models_can_be_named(models: Any) -> None:
    assert build_request(model=models).models == {"A100", "H100"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpus": 0}, "gpus=0 is too few: the least is 1"),
        ({"gpus": -1}, "gpus=-1 is too few: the least is 1"),
        ({"gpus": 1.5}, "gpus=1.5 is no whole number"),
        ({"gpus": "two"}, "gpus='two' is not a number: write it in digits, such as gpus=2"),
        ({"gpus": "1.5"}, "gpus='1.5' is no whole number"),
        ({"gpus": True}, "gpus=True is not a number"),
        ({"gpus": None}, "gpus=None is not a number"),
        ({"gpus": float("inf")}, "gpus=inf is not a number"),
        ({"spares": -1}, "spares=-1 is too few: the least is 0"),
        ({"memory": "64"}, "memory: '64' is no size of memory"),
        ({"host_memory": 64}, "host_memory: 64 is no size of memory"),
        ({"min_tflops": -3}, "min_tflops=-3 is negative"),
        ({"min_tflops": "nan"}, "min_tflops='nan' is not a number"),
        ({"cpu_cores": "many"}, "cpu_cores='many' is not a number"),
        ({"strict": True}, "min_tflops is not given"),
        ({"strict": "maybe", "min_tflops": 1}, "strict='maybe' is neither True nor False"),
        ({"max_runtime": 0}, "max_runtime is 0 seconds"),
        ({"max_runtime": -1}, "max_runtime=-1 is negative"),
        ({"model": 100}, "model=100 names no GPU model"),
        ({"model": ["A100", 3]}, "names no GPU model"),
    ],
)
def test_a_wrong_argument_is_named_with_what_to_write(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as wrong:
        build_request(**given)
    assert message in str(wrong.value)


def test_artifacts_are_written_in_one_way_and_may_come_as_one_name() -> None:
    assert build_request(artifacts="/data//models/gpt2/").artifacts == frozenset({"/data/models/gpt2"})
    assert build_request(artifacts=["sha256:ab", "/m"]).artifacts == frozenset({"sha256:ab", "/m"})


@pytest.mark.parametrize("artifacts", ["", [""], [3], 7, ["/m", None]])
def test_artifacts_without_a_name_are_refused(artifacts: object) -> None:
    with pytest.raises(InvalidRequest, match="names no artifact: write a path or digest"):
        build_request(artifacts=artifacts)  # type: ignore[arg-type]


def test_artifacts_cannot_be_required_without_naming_them() -> None:
    with pytest.raises(InvalidRequest, match="artifacts is not given"):
        build_request(artifacts_required=True)
