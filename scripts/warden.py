"""The parent of all processes of one stack: starts them, notices a death, ends every one of them.

It reads its plan (JSON, one line) from standard input. The one who started it keeps that pipe open; when the
pipe closes, however that came about, everything ends. A detached stack ends on SIGTERM instead.
Invariant: as subreaper the warden is an ancestor of whatever the stack ever forks, so nothing outlives it;
and should the warden itself be killed, its state file still names every process (`scripts.stack` ends them).
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.processes import adopt_orphans, descendants, die_with_parent, end_all, identify

GRACE_S = 8.0  # the API server needs up to 6 s to close its connections
TICK_S = 0.2
CENSUS_S = 1.0
ALREADY_RUNNING = 2  #: exit code


@dataclass(frozen=True)
class Command:
    """A program of the stack; its output goes to ``log``."""

    name: str
    argv: list[str]
    log: str


@dataclass(frozen=True)
class Plan:
    """What to run: ``setup`` one after the other, then ``processes`` all at once."""

    state_file: str
    lock_file: str
    detached: bool
    setup: list[Command]
    processes: list[Command]
    #: what others may want to know of the stack (address, user); copied to the state file
    about: Mapping[str, Any] = field(default_factory=dict)
    grace_s: float = GRACE_S
    #: a process that dies sooner cannot run here: starting it again would not help
    settled_s: float = 10.0

    def to_json(self) -> str:
        """Return the line that the warden reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Plan:
        """Read what `to_json` wrote."""
        raw = json.loads(line)
        for part in ("setup", "processes"):
            raw[part] = [Command(**command) for command in raw[part]]
        return cls(**raw)


MOST_RESTARTS = 10


class Warden:
    """Runs one plan to its end."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._running: dict[int, Command] = {}
        self._started_at: dict[int, float] = {}
        self._restarts = 0
        self._asked_to_stop = False
        self._phase = "preparing"
        self._failure: str | None = None
        self._written = ""
        self._next_census = 0.0

    def run(self) -> int:
        """Start, watch, end; return 0 when it was asked to end, 1 when the stack failed."""
        lock = self._take_lock()
        if lock is None:
            return ALREADY_RUNNING
        adopt_orphans()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._on_signal)
        self._write_state()
        try:
            self._work()
        finally:
            self._phase = "stopping"
            self._write_state()
            end_all(lambda: descendants(os.getpid()), grace_s=self._plan.grace_s)
            self._reap()
            self._phase = "failed" if self._failure else "stopped"
            self._write_state()
        return 1 if self._failure else 0

    def _work(self) -> None:
        for command in self._plan.setup:
            pid = self._start(command)
            while pid in self._running and not self._over():
                self._tick()
            if self._over():
                return
        self._phase = "running"
        for command in self._plan.processes:
            self._start(command)
        while not self._over():
            self._tick()

    def _over(self) -> bool:
        return self._asked_to_stop or self._failure is not None

    def _start(self, command: Command) -> int:
        Path(command.log).parent.mkdir(parents=True, exist_ok=True)
        with open(command.log, "ab") as log:
            child = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own: the terminal's Ctrl-C is the owner's business
                preexec_fn=die_with_parent,  # safe here: the warden has one thread
            )
        self._running[child.pid] = command
        self._started_at[child.pid] = time.monotonic()
        child.returncode = 0  # reaped by `_reap`, with the adopted ones; keeps Popen from waiting or warning
        return child.pid

    def _tick(self) -> None:
        watched = [] if self._plan.detached else [sys.stdin]
        try:
            readable, _, _ = select.select(watched, [], [], TICK_S)
        except InterruptedError:
            readable = []
        if readable and not os.read(sys.stdin.fileno(), 1):
            self._asked_to_stop = True
        self._reap()
        self._write_state()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            command = self._running.pop(pid, None)
            lived_s = time.monotonic() - self._started_at.pop(pid, 0.0)
            expected = self._phase == "stopping" or (self._phase == "preparing" and status == 0)
            if command is None or expected:
                continue
            ended = f"{command.name} ended with code {os.waitstatus_to_exitcode(status)}"
            if (
                self._phase == "running"
                and lived_s >= self._plan.settled_s
                and self._restarts < MOST_RESTARTS
            ):
                # Any part of Airflow may die and come back; what it was doing is in the database.
                self._restarts += 1
                print(
                    f"{ended}; started again ({self._restarts} of {MOST_RESTARTS})",
                    file=sys.stderr,
                    flush=True,
                )
                self._start(command)
            else:
                self._failure = self._failure or ended

    def _on_signal(self, signum: int, frame: object) -> None:
        self._asked_to_stop = True

    def _take_lock(self) -> int | None:
        """Hold the lock for life; the kernel gives it back whatever happens to us."""
        Path(self._plan.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._plan.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def _write_state(self) -> None:
        """Write who runs now, for the owner and for whoever has to clean up after a crash."""
        now = time.monotonic()
        if self._phase == "running" and now < self._next_census and not self._failure:
            return
        self._next_census = now + CENSUS_S
        text = json.dumps(self._state(), indent=1)
        if text == self._written:
            return
        partial = Path(self._plan.state_file).with_suffix(".partial")
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(text)
            os.replace(partial, self._plan.state_file)
        except OSError as error:  # a full disk must end the stack, not the one who ends the stack
            self._failure = self._failure or f"cannot write {partial}: {error.strerror}"
            print(self._failure, file=sys.stderr, flush=True)
            return
        self._written = text

    def _state(self) -> dict[str, Any]:
        me = identify(os.getpid())
        assert me is not None, "a process can always read its own /proc entry"
        return {
            "phase": self._phase,
            "failure": self._failure,
            "detached": self._plan.detached,
            "warden": asdict(me),
            "programs": {
                command.name: asdict(process)
                for pid, command in self._running.items()
                if (process := identify(pid)) is not None
            },
            "processes": [asdict(process) for process in descendants(os.getpid())],
            "about": self._plan.about,
        }


def main() -> int:
    """Read the plan and run it."""
    return Warden(Plan.from_json(sys.stdin.readline())).run()


if __name__ == "__main__":
    raise SystemExit(main())
