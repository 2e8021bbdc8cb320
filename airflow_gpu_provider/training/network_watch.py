"""The supervisor's judgement of the network between the shards, from what they measure.

Ranks are dealt out along a ring of low latency, its relay first. When the slowest hop is above the author's
threshold all the same, the shards are asked to share less often, and more often again when it is clearly
below. Shards on one address (one host) have no network between them: their
latency is told and changes nothing. The `supervisor` asks and publishes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pydantic import JsonValue

from airflow_gpu_provider.training.coordination import RunStore
from airflow_gpu_provider.training.membership import Membership
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.ring import Matrix, matrix_of, relay_of, ring_order, worst_hop
from airflow_gpu_provider.training.run_file import NetworkRecord, RunRecord
from airflow_gpu_provider.training.sync_schedule import Pace

log = logging.getLogger(__name__)

_LOOK_S = 0.5
#: Another ring must be better by this part and by so much: measurements vary.
_BETTER = 0.8
_BETTER_MS = 1.0
#: Looks in a row that must say so, and the least time between two new orders.
_ORDER_AFTER = 2
_ORDER_EVERY_S = 60.0


class NetworkWatch:
    """One run's network."""

    def __init__(self, plan: RunPlan, store: RunStore, record: RunRecord) -> None:
        self._store = store
        self._record = record
        options = plan.network
        self._threshold_ms = options.latency_threshold_ms
        self._pace: Pace | None = None
        if self._threshold_ms is not None and plan.sync_interval > 1 and options.sync_schedule is None:
            longest = options.longest(plan.sync_interval)
            self._pace = Pace(plan.sync_interval, threshold_ms=self._threshold_ms, longest=longest)
        self._base = plan.sync_interval
        self._next_look = 0.0
        self._schedule_word: JsonValue = None
        self._next_order = 0.0
        self._better_looks = 0
        self.sync_interval = 0  #: what the shards are asked for; 0 = nothing

    def look(self, membership: Membership, now: float) -> Membership | None:
        """Take in what is new; return the membership to publish again, None when nothing changes.

        Another ring is a new generation and costs the window that the shards are in. That pays before the
        first synchronisation and where the latency is above the threshold, and there it comes before a longer
        interval.
        """
        members = membership.members
        if now < self._next_look or len(members) < 2 or not membership.is_complete:
            return None
        self._next_look = now + _LOOK_S
        self._take_schedule()
        matrix = self._matrix(members)
        worst = worst_hop(matrix)
        relay = None if worst is None else _by_rank(members)[relay_of(matrix)]
        network = self._record.network
        self._record.network = network.model_copy(update={"latency_ms": worst, "relay": relay})
        if worst is None or not self._spans_addresses(members, membership.generation):
            return None
        if (self._record.step == 0 or self._is_slow(worst)) and now >= self._next_order:
            ranks = self._better_ranks(members, matrix, worst)
            if ranks is not None:
                self._next_order = now + _ORDER_EVERY_S
                return membership.reordered(ranks)
        if self._pace is None or not self._pace.look(worst):
            return None
        self.sync_interval = self._pace.interval
        self._tell(worst)
        return membership

    def _is_slow(self, worst: float) -> bool:
        return self._threshold_ms is not None and worst > self._threshold_ms

    def _better_ranks(
        self, members: Mapping[str, int], matrix: Matrix, worst: float
    ) -> dict[str, int] | None:
        """Return ranks along a ring of clearly lower latency, None when there is none."""
        order = ring_order(matrix)
        best = worst_hop(matrix, order)
        is_better = best is not None and best < worst * _BETTER and worst - best > _BETTER_MS
        self._better_looks = self._better_looks + 1 if is_better else 0
        if best is None or self._better_looks < _ORDER_AFTER:
            return None
        self._better_looks = 0
        by_rank = _by_rank(members)
        self._say(
            f"Ranks follow a ring of lower latency from now on: its slowest hop takes {best:.1f} ms, not "
            f"{worst:.1f} ms; {by_rank[order[0]]}, which has the least latency to all others, has rank 0"
        )
        return {by_rank[place]: rank for rank, place in enumerate(order)}

    def _take_schedule(self) -> None:
        """Note what the shards agreed on; after a resume that is where the pace begins."""
        word = self._store.get("sync_schedule")
        if word is None or word == self._schedule_word:
            return
        self._schedule_word = word
        network = {**self._record.network.model_dump(), "sync_schedule": word}
        self._record.network = NetworkRecord.model_validate(network)
        schedule = self._record.network.sync_schedule
        if self._pace is not None and not self.sync_interval and schedule:
            self._pace.resume(schedule[-1][1])

    def _spans_addresses(self, members: Mapping[str, int], generation: int) -> bool:
        words = [self._store.get(f"ready/{generation}/{uid}") for uid in members]
        hosts = {word.rpartition(":")[0] for word in words if isinstance(word, str)}
        return len(hosts) > 1

    def _matrix(self, members: Mapping[str, int]) -> Matrix:
        names = _by_rank(members)
        measured: dict[str, dict[str, float | None]] = {}
        for uid in names:
            word = self._store.get(f"latency/{uid}")
            measured[uid] = word if isinstance(word, dict) else {}  # type: ignore[assignment]
        return matrix_of(names, measured)

    def _tell(self, worst: float | None) -> None:
        compared = "above" if self.sync_interval > self._base else "no longer above"
        self._say(
            f"The slowest hop between shards takes {worst:.1f} ms, {compared} latency_threshold_ms="
            f"{self._threshold_ms:g}: from the next synchronisation on the shards share every "
            f"{self.sync_interval} steps"
        )

    def _say(self, sentence: str) -> None:
        log.warning("%s", sentence)
        self._record.note(sentence)


def _by_rank(members: Mapping[str, int]) -> list[str]:
    return sorted(members, key=members.__getitem__)
