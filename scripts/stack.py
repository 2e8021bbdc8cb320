"""A real, private Airflow with its GPU broker: API server, scheduler, DAG processor, triggerer, agent.

Invariant: all processes are children of one warden (`scripts.warden`), which ends them when its owner goes,
however it goes; what even a killed warden left is found by the state file at the next start and ended.
The demo, `make up` and the tests start the stack through this module and nothing else.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from scripts import fleet, ports
from scripts.airflow_home import ROOT, USER, AirflowHome, write_private
from scripts.errors import StackError
from scripts.processes import Process, descendants, end_all, send
from scripts.rest import AirflowApi, BrokerApi
from scripts.warden import ALREADY_RUNNING, GRACE_S, Command, Plan

FREE_MIB = 500  # database, logs and models of some runs
READY_TIMEOUT_S = 300.0  # 40 s on two idle cores; a busy machine was seen to take 140 s
COMPONENTS = ("api-server", "scheduler", "dag-processor", "triggerer")


@dataclass(frozen=True)
class StackOptions:
    """How to run a stack."""

    home: AirflowHome
    port: int | None = None  #: None: any free one
    parallelism: int = 4  #: the LocalExecutor forks that many workers at once, 0.2 GB each
    simulated: str = fleet.REAL_OR_DEFAULT  #: fleet to simulate
    detached: bool = False  #: True: goes on when its starter ends, until `make down`
    environment: Mapping[str, str] = field(default_factory=dict)


class Stack:
    """One stack, running or to be run, in the home of its options."""

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        self.home = options.home
        self.state_file = self.home.path / "stack.json"
        self._warden: subprocess.Popen[str] | None = None
        self._api: AirflowApi | None = None

    def __enter__(self) -> Stack:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            if self.is_ours:
                self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def state(self) -> dict[str, Any]:
        """What the warden last wrote; empty when no stack ever ran here."""
        try:
            return dict(json.loads(self.state_file.read_text()))
        except FileNotFoundError:
            return {}

    @property
    def is_running(self) -> bool:
        """True while a warden lives, this object's or another's."""
        warden = self.state.get("warden")
        return warden is not None and Process(**warden).is_alive

    @property
    def is_in_background(self) -> bool:
        """True while a stack of `make up` runs; whoever needs one may use it."""
        return self.is_running and bool(self.state["detached"])

    @property
    def is_ours(self) -> bool:
        """True when this object started it, and so has to end it."""
        return self._warden is not None

    @property
    def url(self) -> str:
        """Return the address of the API server."""
        return str(self.state["about"]["url"])

    @property
    def api(self) -> AirflowApi:
        """Return Airflow's API as the admin."""
        if self._api is None:
            self._api = AirflowApi(self.url, USER, self.home.secrets().password)
        return self._api

    def program(self, name: str) -> Process | None:
        """Return the process of one of the components or of the agent; None while it is started again."""
        found = self.state.get("programs", {}).get(name)
        return None if found is None else Process(**found)

    def broker(self, role: str) -> BrokerApi:
        """Return the broker's API as somebody of this role."""
        return BrokerApi(self.url, fleet.token(self.home, role))

    def start(self) -> None:
        """Start the warden with all processes; returns at once."""
        self._refuse_or_clean()
        port = ports.claim(self.options.port)
        plan, environment = self._plan(port)
        self.home.logs.mkdir(parents=True, exist_ok=True)
        with open(self.home.logs / "warden.log", "ab") as log:
            self._warden = subprocess.Popen(
                [sys.executable, "-m", "scripts.warden"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self._warden.stdin is not None, "asked for a pipe"
        self._warden.stdin.write(plan.to_json() + "\n")
        self._warden.stdin.flush()
        if self.options.detached:
            self._warden.stdin.close()
        while self.state.get("warden", {}).get("pid") != self._warden.pid:
            if (code := self._warden.poll()) is not None:
                self._warden = None
                why = "another stack was starting at the same moment" if code == ALREADY_RUNNING else "see"
                raise StackError(f"the stack did not start: {why} ({self.home.logs / 'warden.log'})")
            time.sleep(0.05)

    def _refuse_or_clean(self) -> None:
        if self.is_running:
            pid = self.state["warden"]["pid"]
            raise StackError(f"a stack already runs in {self.home.path} (pid {pid}); end it with `make down`")
        end_leftovers(self.state)
        self.home.path.mkdir(parents=True, exist_ok=True)
        free_mib = shutil.disk_usage(self.home.path).free // 2**20
        if free_mib < FREE_MIB:
            raise StackError(f"the disk of {self.home.path} has {free_mib} MiB free, {FREE_MIB} are needed")
        for log in self.home.logs.glob("*.log"):
            log.unlink()

    def _plan(self, port: int) -> tuple[Plan, dict[str, str]]:
        url = f"http://127.0.0.1:{port}"
        log_ports = [ports.claim(None) for _ in range(2)]
        environment = {
            **self.home.environment(),
            "AIRFLOW__CORE__PARALLELISM": str(self.options.parallelism),
            "AIRFLOW__API__BASE_URL": url,
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(log_ports[0]),
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(log_ports[1]),
            "AIRFLOW_CONN_GPU_DEFAULT": fleet.connection(self.home, url),
            **self.options.environment,
        }
        write_private(self.home.shell_file, _as_shell(environment))
        airflow = [sys.executable, "-m", "airflow"]
        programs = {
            "api-server": [*airflow, "api-server", "--host", "127.0.0.1", "--port", str(port)],
            "scheduler": [*airflow, "scheduler"],
            "dag-processor": [*airflow, "dag-processor"],
            "triggerer": [*airflow, "triggerer"],
            "gpu-agent": fleet.agent_command(self.home, url, self.options.simulated),
        }
        migrate = [sys.executable, "-m", "scripts.airflow_home", str(self.home.path)]
        plan = Plan(
            state_file=str(self.state_file),
            lock_file=str(self.home.path / "stack.lock"),
            detached=self.options.detached,
            setup=[] if self.home.is_migrated() else [self._command("migration", migrate)],
            processes=[self._command(name, argv) for name, argv in programs.items()],
            about={"url": url, "user": USER},
        )
        return plan, environment

    def _command(self, name: str, argv: list[str]) -> Command:
        return Command(name, argv, str(self.home.logs / f"{name}.log"))

    def wait_ready(
        self, *, timeout_s: float = READY_TIMEOUT_S, report: Callable[[list[str]], None] = lambda _: None
    ) -> None:
        """Return when all components are healthy and the broker knows the fleet."""
        deadline = time.monotonic() + timeout_s
        with_broker = self.broker("admin")
        while missing := (self.api.unhealthy() or ([] if with_broker.devices() else ["gpu-agent"])):
            self.raise_if_failed()
            report(missing)
            if time.monotonic() > deadline:
                raise StackError(
                    f"not ready after {timeout_s:.0f} s: {', '.join(missing)}; see {self.home.logs}"
                )
            time.sleep(0.5)
        with_broker.close()

    def wait_for_dag(self, dag_id: str, *, timeout_s: float = 120.0) -> None:
        """Return when a DAG can be triggered; raise at once when its file cannot be imported."""
        deadline = time.monotonic() + timeout_s
        while not self.api.dag_is_known(dag_id):
            self.raise_if_failed()
            if time.monotonic() > deadline:
                folders = ", ".join(map(str, self.home.dag_folders))
                raise StackError(
                    f"Airflow found no DAG {dag_id!r} in {folders} within {timeout_s:.0f} s; "
                    f"see {self.home.logs / 'dag-processor.log'}"
                )
            time.sleep(0.5)

    def raise_if_failed(self) -> None:
        """Raise when the stack ended, with the last words of the process that ended it."""
        if self.is_running or (self._warden is not None and self._warden.poll() is None):
            return
        failure = self.state.get("failure") or "the warden of the stack was killed"
        raise StackError(explain(failure, self.home.logs))

    def stop(self) -> None:
        """End every process; returns when all are gone."""
        if self._api is not None:
            self._api.close()
        state = self.state
        if self._warden is not None and self._warden.stdin is not None:
            self._warden.stdin.close()
        if state:
            send(Process(**state["warden"]), signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S + 5
        while self.is_running and time.monotonic() < deadline:
            time.sleep(0.1)
        if self._warden is not None and not self.is_running:
            self._warden.wait()
        end_leftovers(self.state)


def _as_shell(environment: Mapping[str, str]) -> str:
    """Return what a shell reads so that `airflow` means this stack's; not what the user's own shell has."""
    own = {name: value for name, value in environment.items() if name.startswith("AIRFLOW")}
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(own.items()))


def end_leftovers(state: Mapping[str, Any]) -> None:
    """End what a killed warden left, and all that came of it since."""
    named = [Process(**process) for process in state.get("processes", ())]
    if "warden" in state:
        named.append(Process(**state["warden"]))

    def living() -> list[Process]:
        alive = [process for process in named if process.is_alive]
        return [*alive, *(below for process in alive for below in descendants(process.pid))]

    end_all(living, grace_s=2.0)


def explain(failure: str, logs: Path) -> str:
    """Return the failure with the last lines that the process wrote."""
    log = logs / f"{failure.split()[0]}.log"
    if not log.exists():
        return f"{failure}; see the logs in {logs}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{failure}; the end of {log}:\n  " + "\n  ".join(lines[-12:])
