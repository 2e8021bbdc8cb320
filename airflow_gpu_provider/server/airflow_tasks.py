"""Read the states of task instances from Airflow's metadata database; only for server-side processes.

Over one connection of its own, so that neither Airflow's pool nor what hangs in it delays the answer, and
with bounds: on connecting, on each statement, and on a network that swallows what is sent. It is made the way
in which Airflow makes its own, with the arguments and the login that its configuration names. The next step
is `reconciler`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Engine, select, text, tuple_
from sqlalchemy.engine import make_url

from airflow_gpu_provider.server.board import TaskId
from airflow_gpu_provider.server.reconciler import TaskState

_BOUND_S = 5
_AT_ONCE = 500  # tasks in a statement

_BY_BACKEND: dict[str, dict[str, Any]] = {
    "postgresql": {
        "connect_timeout": _BOUND_S,
        "keepalives_idle": _BOUND_S,
        "keepalives_interval": 1,
        "keepalives_count": _BOUND_S,
        "tcp_user_timeout": _BOUND_S * 1000,
    },
    "mysql": {"connect_timeout": _BOUND_S, "read_timeout": _BOUND_S, "write_timeout": _BOUND_S},
    "sqlite": {"timeout": _BOUND_S, "check_same_thread": False},
}


class AirflowTasks:
    """The task instances of this Airflow. The connection is made at the first question."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def __call__(self, tasks: Iterable[TaskId]) -> dict[TaskId, TaskState]:
        """Return the state of each task that there is."""
        from airflow.models.taskinstance import TaskInstance

        key = (TaskInstance.dag_id, TaskInstance.run_id, TaskInstance.task_id, TaskInstance.map_index)
        looked_for = select(*key, TaskInstance.state, TaskInstance.try_number)
        looked_for = looked_for.prefix_with(f"/*+ MAX_EXECUTION_TIME({_BOUND_S * 1000}) */", dialect="mysql")
        found: dict[TaskId, TaskState] = {}
        wanted = list(tasks)
        self._engine = self._engine or _connect()
        with self._engine.connect() as connection:
            if connection.dialect.name == "postgresql":  # LOCAL: a pooler may give it to others afterwards
                connection.execute(text(f"SET LOCAL statement_timeout = {_BOUND_S * 1000}"))
            for start in range(0, len(wanted), _AT_ONCE):
                some = looked_for.where(tuple_(*key).in_(wanted[start : start + _AT_ONCE]))
                for dag_id, run_id, name, map_index, state, try_number in connection.execute(some):
                    value = None if state is None else str(getattr(state, "value", state))
                    found[(dag_id, run_id, name, map_index)] = TaskState(value, try_number)
        return found


def _connect() -> Engine:
    from airflow import settings
    from airflow.configuration import conf

    url = settings.SQL_ALCHEMY_CONN or conf.get_mandatory_value("database", "sql_alchemy_conn")
    own: dict[str, Any] = {}
    if conf.has_option("database", "sql_alchemy_connect_args"):
        own = conf.getimport("database", "sql_alchemy_connect_args") or {}
    bounds = _BY_BACKEND.get(make_url(url).get_backend_name(), {})
    pool = {"pool_size": 1, "max_overflow": 0, "pool_pre_ping": True, "pool_recycle": 1800}
    return settings.create_metadata_engine(url, engine_args=pool, connect_args={**bounds, **own})
