"""One real Airflow with its broker for the whole session: the demo's stack on a simulated fleet.

Tests share it, so they must not count on being alone: name what is yours (run ids, output folders), and give
back what you lease. DAG files for tests lie in `tests/stack/dags`, the examples are there too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.airflow_home import DAGS, AirflowHome
from scripts.rest import BrokerApi
from scripts.stack import Stack, StackOptions

TEST_DAGS = Path(__file__).with_name("dags")
FLEET = "node-a:2xA100-80GB;node-v:2xV100-32GB"
RUN_TIMEOUT_S = 240.0


@pytest.fixture(scope="session")
def stack(airflow_home_template: AirflowHome, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Yield the running stack: `url`, `api` (Airflow as the admin), `broker(role)`, `home`."""
    home = AirflowHome(tmp_path_factory.mktemp("stack"), dag_folders=[DAGS, TEST_DAGS])
    home.take_database_of(airflow_home_template)
    options = StackOptions(
        home=home,
        simulated=FLEET,
        environment={
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "2",
            # Longer than any test: a lease that ends here did not end by its TTL.
            "AIRFLOW__GPU__LEASE_TTL_S": "300",
            # A killed worker or triggerer is missed within seconds; a heartbeat comes every 5 s.
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "2",
            "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "10",
        },
    )
    with Stack(options) as running:
        yield running


@pytest.fixture(scope="session")
def broker(stack: Stack) -> Iterator[Callable[[str], BrokerApi]]:
    """Return ``broker(role)``: the broker's API with a token of that role (task, agent, admin)."""
    with ExitStack() as opened:

        def as_role(role: str) -> BrokerApi:
            client = stack.broker(role)
            opened.callback(client.close)
            return client

        yield as_role


@pytest.fixture(scope="session")
def run_dag(stack: Stack) -> Callable[..., tuple[str, str]]:
    """Return ``run(dag_id, conf)``: trigger, wait for the end, return (run id, state)."""

    def run(dag_id: str, conf: Mapping[str, object] | None = None) -> tuple[str, str]:
        stack.wait_for_dag(dag_id)
        run_id = stack.api.trigger(dag_id, conf or {})
        return run_id, stack.api.wait_for_run(dag_id, run_id, timeout_s=RUN_TIMEOUT_S)

    return run


@pytest.fixture(scope="session")
def failed_task_logs(stack: Stack) -> Callable[[str, str], str]:
    """Return ``logs(dag_id, run_id)``: what the failed tasks of a run wrote, for assertion messages."""

    def logs(dag_id: str, run_id: str) -> str:
        failed = [t for t in stack.api.task_instances(dag_id, run_id) if t["state"] == "failed"]
        return "\n\n".join(f"{t['task_display_name']}\n{stack.api.task_log(t)[-4000:]}" for t in failed)

    return logs
