"""One training in the running stack as the tests look at it: task, processes, record, lease."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from airflow_gpu_provider.operators.keeper_files import Whereabouts
from airflow_gpu_provider.training.run_file import RunRecord, read_record
from airflow_gpu_provider.training.run_folder import RunFolder, folder_name
from scripts.rest import BrokerApi
from scripts.stack import Stack


def until(check: Callable[[], Any], what: str, seconds: float = 90) -> Any:
    """Return the first true answer of `check`."""
    deadline = time.monotonic() + seconds
    while not (answer := check()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return answer


class TrainingTask:
    """The training of one DAG run."""

    def __init__(
        self,
        stack: Stack,
        broker: BrokerApi,
        dag_id: str,
        *,
        task_id: str = "train",
        map_index: int = -1,
        run_id: str | None = None,
        **conf: object,
    ) -> None:
        stack.wait_for_dag(dag_id)
        self.dag_id, self.task_id, self.map_index = dag_id, task_id, map_index
        self.run_id = run_id or stack.api.trigger(dag_id, conf)
        self._api, self._broker = stack.api, broker
        parts = [dag_id, self.run_id, task_id, *([str(map_index)] if map_index >= 0 else [])]
        self.folder = RunFolder(Path(stack.home.path, "gpu_training", *map(folder_name, parts)))

    # -- what Airflow says
    def instance(self) -> dict[str, Any]:
        """Return the task instance."""
        every = self._api.task_instances(self.dag_id, self.run_id)
        return next(
            t for t in every if t["task_id"] == self.task_id and t["map_index"] in (self.map_index, -1)
        )

    @property
    def state(self) -> str | None:
        """The state of the task instance."""
        state: str | None = self.instance()["state"]
        return state

    def succeeds(self, seconds: float = 400) -> Any:
        """Return the XCom once the task succeeded."""
        final = until(
            lambda: (s := self.state) in ("success", "failed", "upstream_failed") and s, self.run_id, seconds
        )
        assert final == "success", self.log()
        path = f"{self._path}/xcomEntries/return_value?map_index={self.map_index}&deserialize=true"
        return self._api.request("GET", path)["value"]

    def log(self, try_number: int | None = None) -> str:
        """Return the log of a try, the last one by default."""
        instance = self.instance()
        return self._api.task_log({**instance, "try_number": try_number or instance["try_number"]})

    def mark_failed(self) -> None:
        """Mark the task as failed, as a person does."""
        self._api.request("PATCH", self._path, json={"new_state": "failed"})

    def clear(self) -> None:
        """Clear the task, as a person does."""
        body = {"dry_run": False, "dag_run_id": self.run_id, "task_ids": [self.task_id], "only_failed": False}
        self._api.request("POST", f"/api/v2/dags/{self.dag_id}/clearTaskInstances", json=body)

    @property
    def _path(self) -> str:
        return f"/api/v2/dags/{self.dag_id}/dagRuns/{self.run_id}/taskInstances/{self.task_id}"

    # -- what the broker says
    def leases(self) -> list[dict[str, Any]]:
        """Return the live leases of the run."""
        return [each for each in self._broker.get("/leases").json() if each["key"]["run_id"] == self.run_id]

    # -- what is in its folder
    @property
    def attempts(self) -> list[str]:
        """The names of all attempts."""
        return sorted(each.name for each in self.folder.root.glob("attempts/*"))

    def record(self) -> RunRecord | None:
        """Return where the training stands."""
        attempt = self.folder.last_attempt()
        return None if attempt is None else read_record(attempt / "run.json")

    def trains(self, beyond: int = 0) -> RunRecord:
        """Return the record once the training is beyond a step and has a checkpoint."""

        def is_beyond() -> RunRecord | None:
            record = self.record()
            if record is None:
                assert self.state not in ("failed", "upstream_failed"), self.log()
            return record if record is not None and record.step > beyond else None

        found: RunRecord = until(is_beyond, f"{self.run_id} trains")
        return found

    def processes(self) -> list[psutil.Process]:
        """Return the keeper and all below it."""
        attempt = self.folder.last_attempt()
        where = None if attempt is None else Whereabouts.read(attempt / "keeper.json")
        assert where is not None, "no keeper yet"
        keeper = psutil.Process(where.pid)
        return [keeper, *keeper.children(recursive=True)]

    def shard(self, rank: int) -> psutil.Process:
        """Return the process that has a rank."""
        record = self.record()
        assert record is not None
        (uid,) = [uid for uid, its_rank in record.members.items() if its_rank == rank]
        return next(each for each in self.processes() if each.name() == f"shard-{uid}")

    # -- its worker
    def task_process(self) -> psutil.Process:
        """Return the process that runs the task; its parent is the worker."""
        name = f"airflow worker -- {self.instance()['id']}"
        found: psutil.Process = until(
            lambda: next((p for p in psutil.process_iter(["cmdline"]) if _title(p) == name), None),
            f"a process {name}",
        )
        return found


def _title(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or ()).strip()


def kill_program(stack: Stack, name: str) -> None:
    """Kill a component of Airflow with all that it started; the warden starts it again."""
    program = stack.program(name)
    assert program is not None, name
    root = psutil.Process(program.pid)
    for each in (root, *root.children(recursive=True)):
        os.kill(each.pid, signal.SIGKILL)


def assert_all_end(processes: list[psutil.Process]) -> None:
    """Wait until none of the processes is left."""
    _gone, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []
