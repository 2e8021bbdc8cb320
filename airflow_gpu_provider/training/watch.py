"""Which processes of a run are lost, and why: what they say, what the kernel says, what they left behind.

Brings together heartbeats (`liveness`), process states and the remains of ended ones (`children`), and lets
`failures` name the cause. It only looks: the `supervisor` ends processes and deals out ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pydantic import JsonValue

from airflow_gpu_provider.training.children import Children
from airflow_gpu_provider.training.coordination import RunStore
from airflow_gpu_provider.training.failures import FailureCause, ShardFailure, classify
from airflow_gpu_provider.training.liveness import Liveness
from airflow_gpu_provider.training.membership import Membership
from airflow_gpu_provider.training.pace import Counters
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.process_state import read_process_state


class Watch:
    """The supervisor's eyes."""

    def __init__(self, plan: RunPlan, store: RunStore, children: Children) -> None:
        self._store = store
        self._children = children
        self.liveness = Liveness(plan)
        self.counters: dict[str, Counters] = {}  #: of each process, the newest it told
        self._beats: dict[str, JsonValue] = {}
        self._heard: dict[str, int] = {}  #: how many sentences of each process
        self._sentences: list[str] = []

    def look(self, alive: Iterable[str], now: float) -> None:
        """Take in what is new of the processes that are expected to live."""
        self.liveness.tick(now)
        for uid in alive:
            word = self._store.get(f"heartbeat/{uid}")
            if isinstance(word, dict):
                notes, pace = word.pop("notes", None), word.pop("pace", None)
                if word["beat"] != self._beats.get(uid):
                    self._beats[uid] = word["beat"]
                    self._hear_notes(uid, notes)
                    self.counters[uid] = Counters.model_validate(pace or {})
                self.liveness.hear(uid, now=now, **word)  # type: ignore[arg-type]
            if self._children.exit_code(uid) is None:
                state = read_process_state(self._children.pid(uid))
                if state is not None:
                    self.liveness.observe(uid, state, now=now)

    def take_sentences(self) -> list[str]:
        """Return what processes have told people since the last call."""
        sentences, self._sentences = self._sentences, []
        return sentences

    def _hear_notes(self, uid: str, notes: JsonValue) -> None:
        for number, sentence in notes.items() if isinstance(notes, dict) else ():
            if int(number) >= self._heard.get(uid, 0):
                self._heard[uid] = int(number) + 1
                self._sentences.append(str(sentence))

    def has_one_ended(self, membership: Membership) -> bool:
        """Say whether any process has ended, which costs less to ask than `lost`."""
        return any(self._children.exit_code(uid) is not None for uid in membership.alive)

    def lost(self, membership: Membership, now: float) -> list[ShardFailure]:
        """Return the processes that ended too early or have to be given up, the first cause first."""
        found = [self._examine(uid, membership.members.get(uid), now) for uid in membership.alive]
        return [failure for _, failure in sorted((each for each in found if each), key=lambda each: each[0])]

    def _examine(self, uid: str, rank: int | None, now: float) -> tuple[float, ShardFailure] | None:
        given_up: dict[str, float | None] = {}
        if self._children.exit_code(uid) is None:
            given_up = {
                "stopped": self.liveness.stopped_for(uid, now),
                "silent": self.liveness.silent_for(uid, now),
                "stalled": self.liveness.stalled_for(uid, now),
                "unjoined": self.liveness.unjoined_for(uid, now),
            }
            if all(each is None for each in given_up.values()):
                return None
        elif self._store.has([f"done/{uid}"]) or self._store.has([f"left/{uid}"]):
            return None
        remains = replace(
            self._children.remains(uid),
            stopped_for_s=given_up.get("stopped"),
            silent_for_s=given_up.get("silent"),
            stalled_for_s=given_up.get("stalled"),
            unjoined_for_s=given_up.get("unjoined"),
        )
        cause, evidence = classify(remains)
        step = remains.report.step if remains.report else self.liveness.step(uid)
        told_at = remains.report.at if remains.report else float("inf")
        # MemoryError and the kernel tell of the host's memory, of which another device has no more.
        has_reported = cause is FailureCause.OUT_OF_MEMORY and remains.report is not None
        return told_at, ShardFailure(
            uid=uid,
            rank=rank,
            step=step,
            cause=cause,
            evidence=evidence,
            is_of_device=has_reported and not evidence.startswith(MemoryError.__name__),
        )
