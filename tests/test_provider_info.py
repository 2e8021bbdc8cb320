"""What Airflow is told of the provider is true: it fits Airflow's schema and every name in it exists."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import airflow
import jsonschema
import pytest
from airflow.sdk import BaseHook, BaseOperator

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.provider_info import get_provider_info


@pytest.fixture(scope="module")
def info() -> dict[str, Any]:
    return get_provider_info()


def _modules(info: dict[str, Any]) -> Iterator[str]:
    for kind in ("operators", "sensors", "hooks", "triggers"):
        for entry in info[kind]:
            yield from entry["python-modules"]


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_it_fits_airflows_schema(info: dict[str, Any]) -> None:
    schemas = [Path(path) / "provider_info.schema.json" for path in airflow.__path__]
    schema = next(path for path in schemas if path.is_file())
    jsonschema.validate(info, json.loads(schema.read_text()))


def test_every_module_and_class_exists(info: dict[str, Any]) -> None:
    for module in _modules(info):
        importlib.import_module(module)
    (connection,) = info["connection-types"]
    hook = _load(connection["hook-class-name"])
    assert issubclass(hook, BaseHook)
    assert hook.conn_type == connection["connection-type"]
    for path in (*info["cli"], *info["db-managers"], *(d["class-name"] for d in info["task-decorators"])):
        assert callable(_load(path))


def test_every_operator_module_is_listed(info: dict[str, Any]) -> None:
    package = Path(importlib.import_module("airflow_gpu_provider").__file__ or "").parent
    defined = {
        f"airflow_gpu_provider.{folder}.{path.stem}"
        for folder in ("operators", "sensors", "triggers", "hooks")
        for path in (package / folder).glob("*.py")
        if any(
            isinstance(value, type)
            and issubclass(value, (BaseOperator, BaseHook))
            and value.__module__ == f"airflow_gpu_provider.{folder}.{path.stem}"
            for value in vars(importlib.import_module(f"airflow_gpu_provider.{folder}.{path.stem}")).values()
        )
        and not path.stem.startswith("_")
    }
    assert defined <= set(_modules(info))


def test_the_three_entry_points_load() -> None:
    expected = {"apache_airflow_provider": "provider_info", "airflow.plugins": "gpu", "airflow.policy": "gpu"}
    for group, name in expected.items():
        ours = [e for e in entry_points(group=group) if e.value.startswith("airflow_gpu_provider")]
        assert [entry.name for entry in ours] == [name]
        assert ours[0].load() is not None


def test_every_setting_is_listed_with_its_sentence(info: dict[str, Any]) -> None:
    options = info["config"]["gpu"]["options"]
    assert set(options) == set(Settings.model_fields)
    for name, option in options.items():
        assert option["description"].endswith("."), name
    assert options["token_secret"]["sensitive"] is True


def test_a_wrong_table_of_gpu_models_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__GPU__FLAVORS", '{"Q1": {"rating": 5}}')
    with pytest.raises(InvalidRequest, match="'Q1' needs its memory"):
        Settings.load()
    monkeypatch.setenv("AIRFLOW__GPU__FLAVORS", '{"Q1": {"rating": 5, "memory": "8GiB"}}')
    assert Settings.load().own_flavors()["Q1"].rating == 5


def test_a_wrong_setting_is_named_and_a_secret_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__GPU__MAX_LOAD", "7")
    with pytest.raises(InvalidRequest, match=r"\[gpu\] max_load = '7'.*less than or equal to 1"):
        Settings.load()


def test_a_typo_names_the_option_that_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__GPU__LEASE_TTL", "45")
    with pytest.raises(InvalidRequest, match=r"\[gpu\] has no option lease_ttl; did you mean lease_ttl_s"):
        Settings.load()


@pytest.mark.parametrize("name", ["HISTORY_DAYS", "FORGET_NODES_AFTER_S", "PREEMPTION_LEAST_RUNTIME_S"])
@pytest.mark.parametrize("value", ["inf", "1e300"])
def test_no_length_of_time_is_without_end(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"AIRFLOW__GPU__{name}", value)
    with pytest.raises(InvalidRequest, match=name.lower()):
        Settings.load()


def test_a_secret_option_may_come_from_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__GPU__TOKEN_SECRET_CMD", "echo a secret")
    assert Settings.load().signing_key() == "a secret"


def test_wrong_quotas_are_refused_at_the_start_with_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__GPU__QUOTAS", '{"vision": {"gpus": 3}}')
    with pytest.raises(InvalidRequest, match=r"\[gpu\] quotas = .*quota of team 'vision'.*devices, limit"):
        Settings.load()


def test_settings_come_from_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__GPU__LEASE_TTL_S", "45")
    monkeypatch.setenv("AIRFLOW__GPU__TOKEN_SECRET", "a secret")
    settings = Settings.load()
    assert (settings.lease_ttl_s, settings.signing_key()) == (45, "a secret")


def test_without_a_key_of_its_own_it_derives_one_that_is_not_airflows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "airflow's secret")
    key = Settings(token_secret="").signing_key()
    assert key == Settings(token_secret="").signing_key()
    assert "airflow's secret" not in key
