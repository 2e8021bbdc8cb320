"""The JSON request of a training task: in a DAG file, or as the configuration of a run triggered by hand.

The border where foreign text becomes values: every mistake is told with the field, what was given, what is
allowed and what to change, all mistakes at once. Free of Airflow and torch. Next: `operators.training` asks
for the devices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from airflow_gpu_provider.broker.units import parse_mib
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.shard_range import check_start, shard_range
from airflow_gpu_provider.training.slots import devices_per_shard


def _no_boolean(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


Whole = Annotated[int, BeforeValidator(_no_boolean)]
Amount = Annotated[float, BeforeValidator(_no_boolean)]


_NUMBER_OF_SHARDS: TypeAdapter[int] = TypeAdapter(Annotated[Whole, Field(ge=1, le=4096)])


def _shard_count(value: object) -> int | str:
    """Return a number of shards, or the range of an elastic run as "2-4"."""
    if (elastic := shard_range(value)) is not None:
        return elastic.text
    try:
        return _NUMBER_OF_SHARDS.validate_python(value)
    except ValidationError as error:  # told with the field's own description, not with this adapter's name
        raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


ShardCount = Annotated[int | str, PlainValidator(_shard_count)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class GpuNeeds(_Part):
    """Which devices the task needs."""

    count: Whole = Field(ge=1, description="a whole number of GPUs, 1 or more, for example 2")
    model: str | None = Field(
        None, min_length=1, description='a GPU model such as "A100" or "A100|H100", or null'
    )
    min_flops: Amount | None = Field(
        None, ge=0, description="compute asked of each GPU in TFLOPS, 0 or more, for example 35; or null"
    )


class ResourceNeeds(_Part):
    """What the task needs of the fleet."""

    gpu: GpuNeeds = Field(description='an object such as {"count": 2, "model": "A100", "min_flops": 35}')
    memory: str | None = Field(
        None, description='main memory of the whole task with its unit, for example "64GiB"; or null'
    )
    cpu_cores: Amount | None = Field(
        None, gt=0, description="CPU cores of the whole task, more than 0, for example 8; or null"
    )

    @field_validator("memory")
    @classmethod
    def _memory_has_a_unit(cls, value: str | None) -> str | None:
        if value is not None:
            parse_mib(value)
        return value


class TaskRequest(_Part):
    """One training task."""

    task_id: str = Field(min_length=1, max_length=250, description='a name, for example "fine_tune_gpt2"')
    task_type: Literal["micro_train"] = Field(description='"micro_train"')
    resource_requirements: ResourceNeeds = Field(
        description='an object such as {"gpu": {"count": 2}, "memory": "64GiB", "cpu_cores": 8}'
    )
    priority: Amount = Field(0, description="the business value as a number, higher is sooner, for example 5")
    dependencies: dict[str, str] = Field(
        default_factory=dict,
        description='names and absolute paths, for example {"dataset": "/data/datasets/wikitext"}',
    )
    shard_count: ShardCount = Field(
        description='a whole number of shards, 1 to 4096, for example 2, or "2-4" for four shards on two to '
        "four devices"
    )
    sync_interval: Whole = Field(
        100,
        ge=1,
        description="steps between two synchronisations, 1 or more (1 = every step), for example 100",
    )

    @field_validator("dependencies")
    @classmethod
    def _paths_are_absolute(cls, value: dict[str, str]) -> dict[str, str]:
        for name, path in value.items():
            if not path.startswith("/") or "\0" in path:
                raise ValueError(f"{name} is no absolute path: {path!r}")
        return value

    @model_validator(mode="after")
    def _shards_get_equal_parts(self) -> TaskRequest:
        count = self.resource_requirements.gpu.count
        if isinstance(self.shard_count, int):
            devices_per_shard(count, self.shard_count)
        elif (elastic := shard_range(self.shard_count)) is not None:
            check_start(count, elastic)
        return self


def parse_task_request(value: str | bytes | Mapping[str, Any] | TaskRequest) -> TaskRequest:
    """Return the request, from JSON text or a mapping; raise InvalidRequest that names every mistake."""
    if isinstance(value, TaskRequest):
        return value
    given = _read_json(value) if isinstance(value, str | bytes) else value
    if not isinstance(given, Mapping):
        raise InvalidRequest(
            f"The task request is {type(given).__name__} {_shown(given)}; allowed is a JSON object with the "
            f"fields {', '.join(TaskRequest.model_fields)}."
        )
    try:
        return TaskRequest.model_validate(dict(given))
    except ValidationError as error:
        mistakes = "; ".join(_teach(dict(mistake)) for mistake in error.errors())
        raise InvalidRequest(f"The task request is refused: {mistakes}.") from None


def _read_json(text: str | bytes) -> object:
    shown = text.decode(errors="replace") if isinstance(text, bytes) else text
    try:
        return json.loads(text)
    except ValueError as error:
        at = getattr(error, "pos", 0)
        is_cut = at >= len(shown.rstrip()) or "Unterminated" in str(error)
        cause = "it ends too early, as if it was cut off" if is_cut else str(error)
        raise InvalidRequest(
            f"The task request is no valid JSON: {cause}. Given were {len(shown)} characters that end with "
            f"{_shown(shown[-60:])}; paste the whole object, from '{{' to the last '}}'."
        ) from None


def _teach(mistake: dict[str, Any]) -> str:
    path = [str(part) for part in mistake["loc"]]
    name = ".".join(path) or "the request"
    if mistake["type"] == "extra_forbidden":
        fields = ", ".join(_model_at(path[:-1]).model_fields)
        return (
            f"{name} = {_shown(mistake['input'])} is not a field; allowed are {fields}; correct or remove it"
        )
    allowed = _description(path)
    if mistake["type"] == "missing":
        return f"{name} is missing; add {allowed}"
    sentence = str(mistake["msg"]).removeprefix("Value error, ")
    if not path:
        return sentence.rstrip(".")
    return f"{name} = {_shown(mistake['input'])}: {sentence.rstrip('.')}; allowed is {allowed}; correct it"


def _model_at(path: list[str]) -> type[BaseModel]:
    model: type[BaseModel] = TaskRequest
    for name in path:
        model = model.model_fields[name].annotation  # type: ignore[assignment]
    return model


def _description(path: list[str]) -> str:
    model: type[BaseModel] = TaskRequest
    described = ""
    for name in path:
        field = model.model_fields.get(name)
        if field is None:  # a key of a plain mapping: its owner's description says it
            break
        described = field.description or described
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
        else:
            break
    return described


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
