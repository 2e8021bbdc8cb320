"""The import contracts hold, and they can fail: a contract that nothing can break checks nothing."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_import_contracts_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("importer", "imported", "contract"),
    [
        ("broker/model.py", "airflow_gpu_provider.store.tables", "server-side"),
        ("broker/model.py", "airflow.configuration", "broker-is-pure"),
        ("training/plan.py", "airflow_gpu_provider.broker.model", "training-stands-alone"),
        ("hooks/broker.py", "airflow_gpu_provider.store.tables", "no-database-in-tasks"),
        ("hooks/broker.py", "airflow_gpu_provider.operators.leased", "task-side"),
        ("kubernetes/probe.py", "airflow.configuration", "agents-are-clients"),
    ],
)
def test_a_contract_breaks_when_a_layer_reaches_up(
    tmp_path: Path, importer: str, imported: str, contract: str
) -> None:
    source = ROOT / "airflow_gpu_provider"
    for module in source.rglob("*.py"):
        copy = tmp_path / module.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(module.read_text())
    (tmp_path / ".importlinter").write_text((ROOT / ".importlinter").read_text())
    guilty = tmp_path / "airflow_gpu_provider" / importer
    guilty.write_text(guilty.read_text() + f"\n\nimport {imported}  # noqa\n")
    result = lint_imports(tmp_path)
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    name = contracts[f"importlinter:contract:{contract}"]["name"]
    assert result.returncode != 0
    assert re.search(rf"^{re.escape(name)} BROKEN", result.stdout, re.MULTILINE), result.stdout
