"""What a DAG file imports stays light: the DAG processor pays it for every file, every task for its start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DAG_FILES = sorted((ROOT / "dags").glob("*.py"))
HEAVY = (
    "torch",
    "pynvml",
    "sqlalchemy",
    "alembic",
    "fastapi",
    "uvicorn",
    "kubernetes",
    "kubernetes_asyncio",
    "skimage",
    "scipy",
    "trimesh",
    "PIL",
)
#: What a DAG author writes at the top of a file.
PUBLIC = (
    "airflow_gpu_provider.operators.gpu_pods",
    "airflow_gpu_provider.operators.leased",
    "airflow_gpu_provider.operators.training",
    "airflow_gpu_provider.decorators.gpu",
    "airflow_gpu_provider.sensors.artifacts",
    "airflow_gpu_provider.triggers.lease",
    "airflow_gpu_provider.catalog.pipeline",
    "airflow_gpu_provider.callbacks.redundancy",
    "airflow_gpu_provider.retry_policy",
)
#: Airflow as a DAG file needs it, without this provider.
PLAIN = "import airflow.sdk, airflow.triggers.base, airflow.providers.standard.operators.empty\n"

LOADED = """
import json, sys
{code}
print("LOADED", json.dumps([name for name in {heavy!r} if name in sys.modules]))
"""


def loaded_by(code: str, tmp_path: Path) -> set[str]:
    """Return the heavy packages that a new process has loaded after running ``code``."""
    environment = {**os.environ, "AIRFLOW_HOME": str(tmp_path), "AIRFLOW__CORE__UNIT_TEST_MODE": "False"}
    result = subprocess.run(
        [sys.executable, "-c", LOADED.format(code=code, heavy=HEAVY)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("LOADED ")]
    return set(json.loads(line.removeprefix("LOADED ")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return loaded_by(PLAIN, tmp_path_factory.mktemp("plain"))


def test_the_measure_sees_a_heavy_import(tmp_path: Path) -> None:
    assert "sqlalchemy" in loaded_by("import sqlalchemy", tmp_path)


def test_what_dag_authors_import_adds_nothing_heavy(plain: set[str], tmp_path: Path) -> None:
    added = loaded_by(PLAIN + "\n".join(f"import {name}" for name in PUBLIC), tmp_path) - plain
    assert not added, f"loaded at import: {sorted(added)}; import them inside the function that needs them"


@pytest.mark.parametrize("file", DAG_FILES, ids=lambda file: file.stem)
def test_a_dag_file_adds_nothing_heavy(file: Path, plain: set[str], tmp_path: Path) -> None:
    run_it = f"import runpy; sys.path.insert(0, {str(file.parent)!r}); runpy.run_path({str(file)!r})"
    added = loaded_by(PLAIN + run_it, tmp_path) - plain
    assert not added, f"{file.name} loads {sorted(added)}; import them inside the task that needs them"
