"""What a task and the keeper of its run say to each other, by files in the folder of the attempt.

`Whereabouts` tells every later try where the keeper is, and at last how its lease ended; it holds no secret.
`Orders` travel through the keeper's standard input, and once more as a file that only its owner can read and
that the keeper removes as it reads it: when a later try goes on with the run. Next: `keeper` and `kept_run`.
"""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

from airflow.sdk import Connection
from pydantic import BaseModel, Field

from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.training.process_identity import started_at
from airflow_gpu_provider.training.run_file import write_json
from airflow_gpu_provider.wire import LeaseView, RequestBody, TaskKey


class KeeperEnd(str, Enum):
    """How a keeper ended that could still say so."""

    DONE = "done"
    """The run ended by itself or was stopped by a person; its record says how."""
    LOST = "lost"
    """The lease was lost, or its task was over."""
    PREEMPTED = "preempted"
    """The lease was taken back for other work; its claim waits again."""


class Whereabouts(BaseModel):
    """Where the keeper of a run is."""

    host: str
    pid: int
    started: str
    key: TaskKey  #: of the try that started it
    lease_id: str
    claim_id: str
    request: RequestBody  #: what was asked for; a later try must ask for the same to go on with it
    guard: int | None = None  #: the process below it, and its group
    guard_started: str = ""
    end: KeeperEnd | None = None
    why: str = ""

    @property
    def is_alive(self) -> bool:
        """True while the keeper runs; to be asked on its own host."""
        return started_at(self.pid) == self.started

    @property
    def guard_is_alive(self) -> bool:
        """True while the process below it runs; it is the last of the run to end."""
        return self.guard is not None and started_at(self.guard) == self.guard_started

    @property
    def identity(self) -> tuple[str, str, str]:
        """Host, process id and start: what tells the keeper from every other process."""
        return self.host, str(self.pid), self.started

    def write(self, path: Path) -> None:
        """Replace the file at once."""
        write_json(path, self.model_dump_json(indent=1))

    @classmethod
    def read(cls, path: Path) -> Whereabouts | None:
        """Return what a keeper said; None when no keeper was here or its word cannot be read."""
        try:
            return cls.model_validate_json(path.read_text())
        except (OSError, ValueError):
            return None


class BrokerAddress(BaseModel):
    """A connection to the broker for a process that cannot ask Airflow for it."""

    conn_id: str
    host: str
    schema_: str | None
    port: int | None
    password: str = Field(repr=False)

    @classmethod
    def of(cls, conn_id: str, connection: Connection) -> BrokerAddress:
        """Return what a keeper needs of a connection."""
        return cls(
            conn_id=conn_id,
            host=connection.host or "",
            schema_=connection.schema,
            port=connection.port,
            password=connection.password or "",
        )

    def hook(self) -> GpuBrokerHook:
        """Return a client of that broker."""
        connection = Connection(
            conn_id=self.conn_id,
            conn_type="gpu",
            host=self.host,
            schema=self.schema_,
            port=self.port,
            password=self.password,
        )
        return GpuBrokerHook(self.conn_id, connection=connection)


class Orders(BaseModel):
    """Which lease a keeper holds from now on, and with whom it renews it."""

    broker: BrokerAddress
    lease: LeaseView


def leave_orders(path: Path, orders: Orders) -> None:
    """Leave orders for a keeper that runs; only its user can read them."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(orders.model_dump_json())
    temporary.replace(path)


def take_orders(path: Path) -> Orders | None:
    """Return the orders that were left, and remove them; None = there are none."""
    try:
        text = path.read_text()
        path.unlink()
    except FileNotFoundError:
        return None
    return Orders.model_validate_json(text)
