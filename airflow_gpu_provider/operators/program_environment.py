"""The environment of a program that a task starts: the task's own, in which Airflow can be imported again.

Airflow keeps tasks from its database by an address there that nobody can parse, so `import airflow` fails
wherever that is inherited. Programs get one that leads nowhere instead: they are kept from the database as
well. Used by `kept_run` and `checkpoint_storage`, and handed down to all that those programs start.
"""

from __future__ import annotations

import os

_BLOCKED = "airflow-db-not-allowed:"
#: an empty database in memory, which nobody connects to
_NOWHERE = "sqlite://"


def program_environment(**more: str) -> dict[str, str]:
    """Return the environment for a program of this task, with some more variables."""
    open_to_imports = {
        name: _NOWHERE
        for name in ("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "AIRFLOW__CORE__SQL_ALCHEMY_CONN")
        if os.environ.get(name, "").startswith(_BLOCKED)
    }
    return {**os.environ, **open_to_imports, **more}
