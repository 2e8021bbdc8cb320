"""A process that has imported torch and forks shards: a new one starts in a moment instead of seconds.

The supervisor forks it while it has no thread of its own, and asks it for shards through a pipe. A shard is
forked twice, so that it becomes the supervisor's child: only the supervisor reaps it, it ends with the
supervisor, and the nursery's death harms no shard. Nothing is computed here and no device is touched, since
neither threads nor a CUDA context survive a fork. Linux only; `children` starts shards cold without it.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from airflow_gpu_provider.training import shard
from airflow_gpu_provider.training.parenthood import (
    adopt_orphans,
    end_with_parent,
    in_child,
    name_process,
)

log = logging.getLogger(__name__)

#: what every shard needs; a first optimizer imports torch._dynamo, which takes as long as torch itself
_IMPORTS = (
    "torch",
    "torch._dynamo",
    "airflow_gpu_provider.training.context",
    "airflow_gpu_provider.training.memory_limit",
    "airflow_gpu_provider.training.telemetry",
)
#: a fork takes milliseconds
_ANSWER_WITHIN_S = 15.0
_ADOPTION_S = 10.0


@dataclass(frozen=True, slots=True)
class Order:
    """One shard to start."""

    uid: str
    plan_file: str
    log: str
    environment: Mapping[str, str]  #: all of it


class Nursery:
    """The supervisor's side."""

    def __init__(self, pid: int, orders: int, answers: int) -> None:
        self.pid = pid
        self._orders = os.fdopen(orders, "w", buffering=1)
        self._answers = os.fdopen(answers)
        self._is_open = True

    @classmethod
    def open(cls) -> Nursery | None:
        """Fork the nursery; None where there cannot be one. Call it before anything starts a thread."""
        if not adopt_orphans():
            return None
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        supervisor = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            os.close(ours_in)
            os.close(ours_out)
            in_child(partial(_serve, theirs_in, theirs_out, supervisor))
        os.close(theirs_in)
        os.close(theirs_out)
        return cls(pid, ours_out, ours_in)

    def start(self, order: Order) -> int | None:
        """Return the process id of a new shard, None when the nursery is gone or does not answer."""
        if not self._is_open:
            return None
        try:
            self._orders.write(json.dumps(asdict(order)) + "\n")
            has_answered = bool(select.select([self._answers], [], [], _ANSWER_WITHIN_S)[0])
            answer = self._answers.readline() if has_answered else ""
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._is_open = False
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # it may only be stuck, and start this shard later
            log.warning("The process that starts shards quickly is gone; they start slowly from here on")
            return None
        return int(answer)


def import_for_shards() -> None:
    """Import what every shard needs, where that has not been done yet."""
    for name in _IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would write to, and so copy, pages that all shards share


def _serve(orders: int, answers: int, supervisor: int) -> int:
    end_with_parent(supervisor)
    name_process("nursery")
    import_for_shards()
    with os.fdopen(orders) as lines:
        for line in lines:
            order = Order(**json.loads(line))
            read, write = os.pipe()
            if (between := os.fork()) == 0:
                os.close(read)
                os.close(lines.fileno())
                os.close(answers)
                in_child(partial(_fork_shard, order, write, supervisor))
            os.close(write)
            with os.fdopen(read) as pipe:
                pid = pipe.readline()
            os.waitpid(between, 0)
            os.write(answers, pid.encode())
    return 0


def _fork_shard(order: Order, answer: int, supervisor: int) -> int:
    if (pid := os.fork()) == 0:
        os.close(answer)
        in_child(partial(_be_shard, order, supervisor))
    os.write(answer, f"{pid}\n".encode())
    return 0


def _be_shard(order: Order, supervisor: int) -> int:
    output = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(order.environment)
    deadline = time.monotonic() + _ADOPTION_S
    while os.getppid() != supervisor and time.monotonic() < deadline:
        time.sleep(0.001)
    return shard.main(Path(order.plan_file), order.uid)
