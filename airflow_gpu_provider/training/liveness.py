"""Which processes are silent, stopped or stuck, from their heartbeats and the kernel's word on them.

Only differences on the supervisor's own clock count, so clocks of other machines do not matter. When the
supervisor itself was not running (a suspended machine) the pause is taken off every deadline: it says
nothing of the shards.
"""

from __future__ import annotations

from dataclasses import dataclass

from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.process_state import ProcessState

#: a pause of the supervisor's loop that is longer than any of its own work
_PAUSE_S = 1.0
#: part of a processor above which a silent process is computing; a lock that is waited for takes none
_BUSY_SHARE = 0.05
_EXCUSED = (
    "starting",
    "parked",
    "waiting",
    "finishing",
)  #: phases that may take long by no fault of the shard


@dataclass
class _Watched:
    heard_at: float
    progressed_at: float
    started_at: float
    beat: int = 0
    step: int = -1
    phase: str = "starting"
    version: int = -1
    same_since: float = 0.0  #: step and phase are what they were
    memory_mib: int | None = None
    stopped_at: float | None = None
    cpu_s: float = 0.0
    cpu_s_when_heard: float = 0.0


class Liveness:
    """What is known of each process's heartbeat."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._watched: dict[str, _Watched] = {}
        self._ticked_at: float | None = None

    def watch(self, uid: str, now: float) -> None:
        """Begin to wait for a process."""
        self._watched[uid] = _Watched(heard_at=now, progressed_at=now, started_at=now, same_since=now)

    def forget(self, uid: str) -> None:
        """Stop to wait for a process."""
        self._watched.pop(uid, None)

    def tick(self, now: float) -> None:
        """Note that the supervisor is running; called in each of its rounds."""
        pause = now - self._ticked_at if self._ticked_at is not None else 0.0
        if pause > _PAUSE_S:
            for watched in self._watched.values():
                watched.heard_at += pause
                watched.progressed_at += pause
                watched.same_since += pause
                watched.started_at += pause
                if watched.stopped_at is not None:
                    watched.stopped_at += pause
        self._ticked_at = now

    def hear(
        self,
        uid: str,
        *,
        beat: int,
        phase: str,
        step: int,
        version: int,
        now: float,
        memory_mib: int | None = None,
    ) -> None:
        """Take a heartbeat; one that was heard already changes nothing."""
        watched = self._watched[uid]
        if beat == watched.beat:
            return
        watched.beat, watched.heard_at, watched.memory_mib = beat, now, memory_mib
        watched.cpu_s_when_heard = watched.cpu_s
        if step != watched.step or phase in _EXCUSED or phase != watched.phase:
            watched.progressed_at = now
        if (step, phase) != (watched.step, watched.phase):
            watched.same_since = now
        watched.step, watched.phase, watched.version = step, phase, version

    def observe(self, uid: str, state: ProcessState, *, now: float) -> None:
        """Take what the kernel says of a process."""
        watched = self._watched[uid]
        watched.cpu_s = state.cpu_s
        if not state.is_stopped:
            watched.stopped_at = None
        elif watched.stopped_at is None:
            watched.stopped_at = now

    def stopped_for(self, uid: str, now: float) -> float | None:
        """Return for how long a signal has stopped a process when that is too long, else None."""
        stopped_at = self._watched[uid].stopped_at
        pause = now - stopped_at if stopped_at is not None else 0.0
        return pause if pause > self._plan.stopped_timeout_s else None

    def silent_for(self, uid: str, now: float) -> float | None:
        """Return for how long a process has been silent when that is too long, else None.

        Code that holds Python's global lock keeps the heartbeat waiting: given longer while it computes.
        """
        watched = self._watched[uid]
        silence = now - watched.heard_at
        is_busy = watched.cpu_s - watched.cpu_s_when_heard > _BUSY_SHARE * silence
        limit = self._plan.busy_timeout_s if is_busy else self._plan.heartbeat_timeout_s
        if not watched.beat:
            limit = self._plan.startup_timeout_s
        return silence if silence > limit else None

    def unheard_for(self, uid: str, now: float) -> float:
        """Return the seconds since a process was heard of, however short; 0 for one that is not watched."""
        watched = self._watched.get(uid)
        return 0.0 if watched is None else now - watched.heard_at

    def stalled_for(self, uid: str, now: float) -> float | None:
        """Return for how long a process has computed at one step when that is too long, else None."""
        watched = self._watched[uid]
        pause = now - watched.progressed_at
        return pause if watched.phase == "computing" and pause > self._plan.stall_timeout_s else None

    def unjoined_for(self, uid: str, now: float) -> float | None:
        """Return for how long a process has not come to its loop when that is too long, else None."""
        watched = self._watched[uid]
        age = now - watched.started_at
        return age if watched.phase == "starting" and age > self._plan.join_timeout_s else None

    def computing_for(self, uid: str, now: float) -> float | None:
        """Return for how long a process has computed at its present step, None when it does not."""
        return self._in_phase_for("computing", uid, now)

    def waiting_for(self, uid: str, now: float) -> float | None:
        """Return for how long a process has waited for others, None when it does not."""
        return self._in_phase_for("waiting", uid, now)

    def _in_phase_for(self, phase: str, uid: str, now: float) -> float | None:
        watched = self._watched.get(uid)
        return now - watched.same_since if watched is not None and watched.phase == phase else None

    def parked(self) -> frozenset[str]:
        """Return the processes that wait warm."""
        return frozenset(uid for uid, watched in self._watched.items() if watched.phase == "parked")

    def version(self) -> int:
        """Return the newest state that any process says all shards share."""
        return max((watched.version for watched in self._watched.values()), default=-1)

    def memory_mib(self, uid: str) -> int | None:
        """Return the most that a process said it had taken of one of its devices."""
        watched = self._watched.get(uid)
        return None if watched is None else watched.memory_mib

    def step(self, uid: str) -> int | None:
        """Return the step a process was at."""
        watched = self._watched.get(uid)
        return (
            watched.step
            if watched is not None and watched.step >= 0 and watched.phase != "starting"
            else None
        )
