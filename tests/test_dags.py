"""Every example DAG can be imported by Airflow's own parser and says who owns it and what it is for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.airflow_home import DAGS, ROOT, AirflowHome

# In a process of its own: Airflow reads its configuration once, and other tests must not inherit this one's.
PARSE = """
import json, sys
from airflow.dag_processing.dagbag import DagBag

bag = DagBag(sys.argv[1])
dags = [
    {"dag_id": dag.dag_id, "owner": dag.owner, "tags": sorted(dag.tags), "doc_md": dag.doc_md,
     "tasks": len(dag.tasks), "description": dag.description}
    for dag in bag.dags.values()
]
print("DAGS", json.dumps({"dags": dags, "errors": bag.import_errors}))
"""


def parse(home: AirflowHome, folder: Path) -> dict[str, Any]:
    """Return what Airflow finds in a folder of DAG files."""
    import json

    result = subprocess.run(
        [sys.executable, "-c", PARSE, str(folder)],
        env=home.environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("DAGS ")]
    assert lines, result.stderr[-3000:]
    return dict(json.loads(lines[-1].removeprefix("DAGS ")))


@pytest.fixture(scope="module")
def parsed(airflow_home_template: AirflowHome) -> dict[str, Any]:
    return parse(airflow_home_template, DAGS)


def test_every_dag_file_can_be_imported(parsed: dict[str, Any]) -> None:
    assert parsed["errors"] == {}


def test_the_two_examples_are_there(parsed: dict[str, Any]) -> None:
    assert {"product_catalog_models", "fine_tune_language_model"} <= {d["dag_id"] for d in parsed["dags"]}


def test_every_dag_says_what_it_is_for_and_whose_it_is(parsed: dict[str, Any]) -> None:
    for dag in parsed["dags"]:
        assert dag["doc_md"], f"{dag['dag_id']} has no doc_md"
        assert dag["tags"], f"{dag['dag_id']} has no tags"
        assert dag["owner"] not in ("", "airflow"), f"{dag['dag_id']} has no owner of its own"
        assert dag["tasks"] > 0, f"{dag['dag_id']} has no tasks"


def test_a_broken_file_is_seen(airflow_home_template: AirflowHome, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("from airflow.sdk import DAG\nraise ValueError('no such ship')\n")
    errors = parse(airflow_home_template, tmp_path)["errors"]
    assert "no such ship" in errors[os.fspath(tmp_path / "broken.py")] if errors else pytest.fail("not seen")
