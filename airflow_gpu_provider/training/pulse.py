"""A shard's second thread: says that it lives and hears what the supervisor wants.

The heartbeat carries the step and the phase, because a stopped process sends no heartbeat but a process
whose main thread hangs still does. It has a store client of its own: a process group that is being built
blocks the main thread's. When the store is gone the supervisor is gone, and the shard ends, so that no
orphan trains on.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

from pydantic import JsonValue

from airflow_gpu_provider.training.coordination import Control, RunStore
from airflow_gpu_provider.training.memory_limit import change_limit, used_memory_mib
from airflow_gpu_provider.training.pace import Counters

log = logging.getLogger(__name__)

ORPHAN_EXIT = 71
#: a look at the store costs two processes something; a survivor hears of a loss this much later at most
_POLL_S = 0.1
_IDLE_S = 0.5
#: sentences that each heartbeat repeats, since the supervisor may miss some heartbeats
_NOTES_KEPT = 5


class Phase(str, Enum):
    """What a shard's main thread is doing."""

    STARTING = "starting"
    """Imports and builds the model."""
    PARKED = "parked"
    """A warm spare without a rank."""
    WAITING = "waiting"
    """Waits for other shards or for the supervisor: not its own fault when that takes long."""
    COMPUTING = "computing"
    """In the author's loop body."""
    FINISHING = "finishing"
    """After the last step: saves, or runs the author's code after the loop."""


class Pulse:
    """Heartbeat out, control in."""

    def __init__(self, uid: str, store: RunStore, *, interval_s: float, torch_device: str = "cpu") -> None:
        self._uid = uid
        self._store = store
        self._interval_s = interval_s
        self._torch_device = torch_device
        self._limit_mib: int | None = None  #: what the supervisor has changed it to
        self._outbox: queue.SimpleQueue[tuple[str, JsonValue]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._beat_until_orphaned, name="pulse", daemon=True)
        self.control: Control | None = None
        self._heard = threading.Event()
        self.phase = Phase.STARTING
        self.step = 0
        self.version = -1  #: the last committed synchronised state
        self.counters: Callable[[], Counters] = Counters  #: what this shard has done so far
        self._notes: deque[tuple[int, str]] = deque(maxlen=_NOTES_KEPT)
        self._noted = 0

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def post(self, key: str, value: JsonValue) -> None:
        """Send a value soon, without waiting for it."""
        self._outbox.put((key, value))

    def tell(self, sentence: str) -> None:
        """Let people read a sentence: it goes through the supervisor into run.json and the task's log."""
        self._notes.append((self._noted, sentence))
        self._noted += 1

    def wait_for_word(self) -> None:
        """Wait until the supervisor wants something else than before, or for a moment."""
        self._heard.wait(_IDLE_S)
        self._heard.clear()

    def has_moved_on(self, generation: int) -> bool:
        """Say whether the supervisor has replaced ``generation``."""
        return self.control is not None and self.control.generation != generation

    def _beat_until_orphaned(self) -> None:
        beat = 0
        next_beat_at = 0.0
        try:
            while True:
                while not self._outbox.empty():
                    self._store.put(*self._outbox.get())
                if time.monotonic() >= next_beat_at:
                    beat += 1
                    next_beat_at = time.monotonic() + self._interval_s
                    self._store.put(f"heartbeat/{self._uid}", self._heartbeat(beat))
                self._take(self._store.get_control())
                time.sleep(_POLL_S)
        except Exception:
            # Any failure of the store means the same: the supervisor no longer exists.
            log.exception(
                "The supervisor's store does not answer; this shard ends so that it does not train alone"
            )
            os._exit(ORPHAN_EXIT)

    def _take(self, control: Control | None) -> None:
        if control is None or control == self.control:
            return
        limit_mib = control.limits.get(self._uid)
        if limit_mib is not None and limit_mib != self._limit_mib:
            self._limit_mib = limit_mib
            log.info("This shard may take %d MiB of each of its devices from now on", limit_mib)
            change_limit(limit_mib)
        self.control = control  # after the limit: a spare that takes a rank has the memory for it
        self._heard.set()

    def _heartbeat(self, beat: int) -> JsonValue:
        word: dict[str, JsonValue] = {
            "beat": beat,
            "phase": self.phase.value,
            "step": self.step,
            "version": self.version,
            "pace": self.counters().model_dump(),
            "memory_mib": used_memory_mib(self._torch_device),
        }
        if self._notes:
            word["notes"] = {str(number): sentence for number, sentence in tuple(self._notes)}
        return word
