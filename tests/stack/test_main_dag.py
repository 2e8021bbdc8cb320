"""The main DAG on real Airflow processes: a catalogue in, models out, every device given back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_gpu_provider.catalog.layout import ProductFolders, RunFolders
from scripts.rest import BrokerApi
from scripts.stack import Stack

pytestmark = pytest.mark.stack
SMALL = {"limit": 3, "chunk_size": 1, "steps": 20, "resolution": 32}


def test_a_small_catalogue_becomes_models_on_leased_devices(
    stack: Stack,
    broker: Callable[[str], BrokerApi],
    run_dag: Callable[..., tuple[str, str]],
    failed_task_logs: Callable[[str, str], str],
    tmp_path: Path,
) -> None:
    run_id, state = run_dag("product_catalog_models", {**SMALL, "output": str(tmp_path)})
    assert state == "success", failed_task_logs("product_catalog_models", run_id)
    run = RunFolders(tmp_path, run_id)
    summary = json.loads(run.summary.read_text())
    assert len(summary["products"]) == SMALL["limit"]
    for entry in summary["products"]:
        assert entry["status"] in ("done", "below_threshold"), entry
        assert entry["device_model"].startswith(("A100", "V100")), entry
        version = ProductFolders(tmp_path).version(entry["sku"], entry["version"])
        assert (version / "model.glb").read_bytes()[:4] == b"glTF"
        assert (version / "thumbnail.png").read_bytes()[:4] == b"\x89PNG"
        assert json.loads((version / "report.json").read_text())
    values = [entry["value"] for entry in summary["products"]]
    assert values == sorted(values, reverse=True), "hot products come first"
    assert (run.gallery / "index.html").stat().st_size > 0
    assert broker("admin").get("/leases").json() == []


def test_a_missing_catalogue_fails_the_run_at_once_and_is_named(
    stack: Stack, run_dag: Callable[..., tuple[str, str]], failed_task_logs: Callable[[str, str], str]
) -> None:
    run_id, state = run_dag("product_catalog_models", {"catalog": "/nowhere/catalog.csv"})
    assert state == "failed"
    (plan,) = [
        t for t in stack.api.task_instances("product_catalog_models", run_id) if t["task_id"] == "plan"
    ]
    assert plan["try_number"] == 1, "a missing file is not tried again"
    assert "/nowhere/catalog.csv" in stack.api.task_log(plan)
