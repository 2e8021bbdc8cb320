"""The training request as JSON: the documented one is accepted, every mistake is explained."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.task_request import parse_task_request

DOCUMENTED = (
    '{"task_id": "fine_tune_gpt2", "task_type": "micro_train", "resource_requirements": {"gpu": {"count": 2, '
    '"model": "A100", "min_flops": 35}, "memory": "64GiB", "cpu_cores": 8}, "priority": 5, "dependencies": '
    '{"pretrained_model": "/data/models/gpt2_pretrained", "dataset": "/data/datasets/wikitext"}, '
    '"shard_count": 2, "sync_interval": 100}'
)


def changed(path: str, value: Any) -> dict[str, Any]:
    request = json.loads(DOCUMENTED)
    *parents, name = path.split(".")
    part = request
    for parent in parents:
        part = part[parent]
    if value is ...:
        del part[name]
    else:
        part[name] = value
    return dict(request)


def test_the_documented_request_is_understood_as_text_and_as_a_mapping() -> None:
    request = parse_task_request(DOCUMENTED)
    assert request == parse_task_request(json.loads(DOCUMENTED)) == parse_task_request(request)
    gpu = request.resource_requirements.gpu
    assert (gpu.count, gpu.model, gpu.min_flops) == (2, "A100", 35)
    assert (request.priority, request.shard_count, request.sync_interval) == (5, 2, 100)
    assert request.dependencies["dataset"] == "/data/datasets/wikitext"


def test_only_what_has_no_natural_default_must_be_given() -> None:
    request = parse_task_request(
        {
            "task_id": "t",
            "task_type": "micro_train",
            "resource_requirements": {"gpu": {"count": 1}},
            "shard_count": 1,
        }
    )
    assert (request.priority, request.sync_interval, request.dependencies) == (0, 100, {})


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("resource_requirements.gpu.count", 0, ["resource_requirements.gpu.count = 0", "1 or more"]),
        ("resource_requirements.gpu.count", -1, ["= -1", "1 or more"]),
        ("resource_requirements.gpu.count", 1.5, ["= 1.5", "whole number"]),
        ("resource_requirements.gpu.count", "two", ["= 'two'", "whole number"]),
        ("resource_requirements.gpu.count", True, ["= True", "whole number"]),
        ("resource_requirements.gpu.count", ..., ["gpu.count is missing", "add a whole number"]),
        ("resource_requirements.gpu.count", 3, ["3 GPUs", "2 shards", "multiple of shard_count"]),
        ("resource_requirements.gpu", ..., ["resource_requirements.gpu is missing"]),
        ("resource_requirements.gpu.min_flops", "fast", ["min_flops = 'fast'", "TFLOPS"]),
        ("resource_requirements.memory", "64", ["memory = '64'", "64GiB"]),
        ("resource_requirements.cpu_cores", 0, ["cpu_cores = 0", "more than 0"]),
        ("resource_requirements.cpus", 8, ["cpus = 8 is not a field", "cpu_cores"]),
        ("task_type", "macro_train", ["task_type = 'macro_train'", '"micro_train"']),
        ("task_id", "", ["task_id = ''", "a name"]),
        ("priority", "high", ["priority = 'high'", "a number"]),
        (
            "dependencies",
            {"dataset": "wikitext"},
            ["dataset is no absolute path: 'wikitext'", "/data/datasets"],
        ),
        ("dependencies", {"dataset": 3}, ["dependencies.dataset = 3"]),
        ("shard_count", 0, ["shard_count = 0", "1 to 4096"]),
        ("sync_interval", 0, ["sync_interval = 0", "1 or more"]),
        ("shards", 2, ["shards = 2 is not a field", "shard_count"]),
    ],
)
def test_each_mistake_names_the_field_what_was_given_and_what_is_allowed(
    path: str, value: Any, words: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_task_request(changed(path, value))
    for word in words:
        assert word in error.value.message


def test_all_mistakes_are_told_at_once() -> None:
    request = changed("shard_count", 0) | {"sync_interval": "often"}
    with pytest.raises(InvalidRequest, match=r"shard_count = 0.*sync_interval = 'often'"):
        parse_task_request(request)


@given(st.integers(0, len(DOCUMENTED) - 1))
def test_text_that_was_cut_anywhere_is_refused_and_never_half_understood(length: int) -> None:
    with pytest.raises(InvalidRequest, match=r"no valid JSON.*cut off"):
        parse_task_request(DOCUMENTED[:length])


@pytest.mark.parametrize("value", ["[]", "3", "null", '"text"', [1], None])
def test_what_is_no_object_is_refused_with_the_fields(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"allowed is a JSON object with the fields task_id"):
        parse_task_request(value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    with pytest.raises(InvalidRequest, match="min_flops"):
        parse_task_request(DOCUMENTED.replace("35", number))
