"""A private Airflow home on SQLite: settings by environment, secrets, the migrated database.

Invariant: nothing of the user's own Airflow (environment, ~/airflow) leaks in, and the database file is
replaced only by one that is wholly migrated, so an interruption costs time and nothing else. Next step:
`scripts.stack` starts processes with this environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DAGS = ROOT / "dags"
USER = "admin"


@dataclass(frozen=True)
class Secrets:
    """What the processes of one home must agree on and nobody else may know."""

    password: str
    jwt: str
    broker: str


class AirflowHome:
    """The folder of one private Airflow."""

    def __init__(self, path: Path, *, dag_folders: Sequence[Path] = (DAGS,)) -> None:
        self.path = path.resolve()
        self.dag_folders = tuple(folder.resolve() for folder in dag_folders)
        self.database = self.path / "airflow.db"
        self.logs = self.path / "processes"
        self.shell_file = self.path / "environment.sh"
        self._stamp = self.path / "migrated"

    def secrets(self) -> Secrets:
        """Return the secrets, making them at the first call."""
        file = self.path / "secrets.json"
        if not file.exists():
            fresh = {"password": secrets.token_urlsafe(9), "jwt": secrets.token_hex(32)}
            write_private(file, json.dumps({**fresh, "broker": secrets.token_hex(32)}))
        return Secrets(**json.loads(file.read_text()))

    def environment(self) -> dict[str, str]:
        """Return the environment for any Airflow command in this home."""
        own = self.secrets()
        passwords = self.path / "passwords.json"
        write_private(passwords, json.dumps({USER: own.password}))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "PYTHONSTARTUP"))}
        local = ",".join(filter(None, [inherited.get("NO_PROXY", ""), "127.0.0.1,localhost"]))
        return {
            **inherited,
            "NO_PROXY": local,
            "no_proxy": local,
            "AIRFLOW_HOME": str(self.path),
            # SQLite has one writer at a time: a burst of triggers must wait for it, not fail after 5 s.
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self.database}?timeout=60",
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.dag_folders[0]),
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(passwords),
            "AIRFLOW__API_AUTH__JWT_SECRET": own.jwt,
            "AIRFLOW__GPU__TOKEN_SECRET": own.broker,
            "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps(
                [_bundle(folder) for folder in self.dag_folders]
            ),
            # a DAG file that is new shows soon, not after five minutes
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "15",
            # one device, one process: simulated devices share these cores, more threads only get in the way
            "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", "1"),
        }

    def is_migrated(self) -> bool:
        """Return whether the database has the tables of this very code."""
        return self.database.exists() and self._stamp.exists() and self._stamp.read_text() == _schema()

    def migrate(self) -> None:
        """Bring the tables up to date in a copy, then put the copy in place."""
        fresh = self.database.with_suffix(".fresh")
        for leftover in self.path.glob(f"{fresh.name}*"):
            leftover.unlink()
        if self.database.exists():
            _copy_database(self.database, fresh)
        environment = {**self.environment(), "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{fresh}"}
        subprocess.run([sys.executable, "-m", "airflow", "db", "migrate"], env=environment, check=True)
        self._stamp.unlink(missing_ok=True)
        for leftover in self.path.glob(f"{self.database.name}-*"):  # write-ahead log of the old file
            leftover.unlink()
        os.replace(fresh, self.database)
        self._stamp.write_text(_schema())

    def take_database_of(self, other: AirflowHome) -> None:
        """Start from a copy of another home's migrated database."""
        self.path.mkdir(parents=True, exist_ok=True)
        _copy_database(other.database, self.database)
        self._stamp.write_text(_schema())


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.replace(partial, path)


def _bundle(folder: Path) -> dict[str, object]:
    return {
        "name": "dags" if folder == DAGS else f"{folder.parent.name}-{folder.name}",
        "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
        "kwargs": {"path": str(folder)},
    }


def _copy_database(source: Path, target: Path) -> None:
    """Copy with what its write-ahead log still holds; a plain file copy would lose that."""
    with sqlite3.connect(source) as old, sqlite3.connect(target) as new:
        old.backup(new)
    old.close()
    new.close()


def _schema() -> str:
    """Return a digest of all that decides the tables: Airflow's release and our own store."""
    digest = hashlib.sha256((ROOT / "constraints.txt").read_bytes())
    for path in sorted((ROOT / "airflow_gpu_provider" / "store").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main() -> int:
    """Migrate the home given on the command line; the warden runs this as a step of its own."""
    AirflowHome(Path(sys.argv[1])).migrate()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
