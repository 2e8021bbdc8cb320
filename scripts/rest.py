"""Small clients of the two APIs that a running stack offers: Airflow's and the broker's.

Invariant: every call ends within its time limit, and an answer that says "no" is raised with its text.
Next step: `scripts.stack` waits on these, `scripts.demo` and the tests drive DAG runs with them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import httpx

from scripts.errors import StackError

TIMEOUT_S = 30.0
FINAL_STATES = ("success", "failed")


class AirflowApi:
    """Airflow's public REST API, as one user."""

    def __init__(self, url: str, user: str, password: str) -> None:
        self._login = {"username": user, "password": password}
        # trust_env off: a proxy of the user's is no way to this machine
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def request(self, method: str, path: str, **options: Any) -> Any:
        """Send one request, logging in when needed; return the JSON of the answer."""
        if "Authorization" not in self._http.headers:
            self._log_in()
        answer = self._http.request(method, path, **options)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            self._log_in()
            answer = self._http.request(method, path, **options)
        if answer.is_error:
            raise StackError(f"{method} {path} was answered {answer.status_code}: {answer.text[:500]}")
        return answer.json() if answer.content else None

    def _log_in(self) -> None:
        answer = self._http.post("/auth/token", json=self._login)
        answer.raise_for_status()
        self._http.headers["Authorization"] = f"Bearer {answer.json()['access_token']}"

    def unhealthy(self) -> list[str]:
        """Return the components that are not (yet) healthy; needs no login."""
        try:
            answer = self._http.get("/api/v2/monitor/health")
            answer.raise_for_status()
        except httpx.HTTPError:
            return ["api-server"]
        parts = answer.json()
        return [name for name, part in parts.items() if part and part.get("status") != "healthy"]

    def dag_is_known(self, dag_id: str) -> bool:
        """Return whether the DAG processor has stored this DAG; raise when its file cannot be imported."""
        errors = self.request("GET", "/api/v2/importErrors")["import_errors"]
        if errors:
            told = "; ".join(f"{e['filename']}: {e['stack_trace'].strip().splitlines()[-1]}" for e in errors)
            raise StackError(f"DAG files cannot be imported: {told}")
        return any(dag["dag_id"] == dag_id for dag in self.request("GET", "/api/v2/dags?limit=1000")["dags"])

    def trigger(self, dag_id: str, conf: Mapping[str, object]) -> str:
        """Start a run now; return its id."""
        body = {"logical_date": None, "conf": dict(conf)}
        return str(self.request("POST", f"/api/v2/dags/{dag_id}/dagRuns", json=body)["dag_run_id"])

    def run_state(self, dag_id: str, run_id: str) -> str:
        """Return the state of a run."""
        return str(self.request("GET", f"/api/v2/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """Return all task instances of a run, mapped ones included."""
        path = f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances?limit=1000"
        return list(self.request("GET", path)["task_instances"])

    def task_log(self, task: Mapping[str, Any]) -> str:
        """Return the log text of a task instance's last try."""
        path = (
            f"/api/v2/dags/{task['dag_id']}/dagRuns/{task['dag_run_id']}/taskInstances/{task['task_id']}"
            f"/logs/{max(task['try_number'], 1)}?map_index={task['map_index']}"
        )
        lines = self.request("GET", path, headers={"Accept": "application/json"})["content"]
        return "\n".join(_log_line(line) for line in lines)

    def end_run(self, dag_id: str, run_id: str) -> None:
        """Mark a run as failed, which also ends its tasks."""
        self.request("PATCH", f"/api/v2/dags/{dag_id}/dagRuns/{run_id}", json={"state": "failed"})

    def unfinished_runs(self) -> list[tuple[str, str]]:
        """Return (dag_id, run_id) of all runs that are queued or running."""
        path = "/api/v2/dags/~/dagRuns?limit=1000&state=running&state=queued"
        return [(run["dag_id"], run["dag_run_id"]) for run in self.request("GET", path)["dag_runs"]]

    def wait_for_run(self, dag_id: str, run_id: str, *, timeout_s: float) -> str:
        """Return the final state of a run; raise with the states of its tasks when time is up."""
        deadline = time.monotonic() + timeout_s
        while (state := self.run_state(dag_id, run_id)) not in FINAL_STATES:
            if time.monotonic() > deadline:
                tasks = {t["task_display_name"]: t["state"] for t in self.task_instances(dag_id, run_id)}
                raise StackError(
                    f"{dag_id} {run_id} is still {state} after {timeout_s:.0f} s; tasks: {tasks}"
                )
            time.sleep(0.5)
        return state


def _log_line(line: object) -> str:
    """Return what a line of a structured log says, with the exception that it carries."""
    if not isinstance(line, dict):
        return str(line)
    raised = [f"{e['exc_type']}: {e['exc_value']}" for e in line.get("error_detail") or ()]
    return "\n".join([str(line.get("event", line)), *raised[:1]])  # the first is the outermost


class BrokerApi:
    """The broker's API under the same address, with one broker token."""

    def __init__(self, url: str, token: str) -> None:
        self._http = httpx.Client(
            base_url=f"{url}/gpu/v1",
            headers={"Authorization": f"Bearer {token}"},
            timeout=TIMEOUT_S,
            trust_env=False,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str) -> httpx.Response:
        """Return the broker's answer to a question, whatever it is."""
        return self._http.get(path)

    def post(self, path: str, body: object) -> httpx.Response:
        """Return the broker's answer to a request, whatever it is."""
        return self._http.post(path, json=body)

    def nodes(self) -> list[dict[str, Any]]:
        """Return the fleet with its devices."""
        answer = self.get("/nodes")
        answer.raise_for_status()
        return list(answer.json())

    def devices(self) -> int | None:
        """Return how many devices the broker knows, None while it does not answer."""
        try:
            answer = self.get("/status")
        except httpx.HTTPError:
            return None
        return int(answer.json()["devices"]) if answer.is_success else None
