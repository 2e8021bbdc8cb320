"""Learn from finished runs how many redundant shards the next run should have.

The failure rate of a run's shards is estimated from the history of its task class and model, shrunk towards
the class, the fleet and at last a prior, so that one bad run moves it a little and a hundred move it fully;
each level is estimated without the runs of the level below, so that no run counts twice. Old runs fade.
Nodes that fail more than their runs explain raise it further. The share is twice the rate: 5 % of failures
ask for 10 % of redundant shards. The next step is the number of spares of the training's request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeAlias

from airflow_gpu_provider.broker.model import NodeName

_Key: TypeAlias = tuple[str, ...]
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How many shards a finished run had, and how many of them failed for a fault that was not the user's."""

    task_class: str | None
    model: str | None
    nodes: tuple[NodeName, ...]
    shards: int
    failures: int
    at: datetime
    failed_on: tuple[NodeName, ...] = ()  #: the node of each failure, where known


@dataclass(frozen=True, slots=True)
class RedundancyPolicy:
    """How fast to believe and to forget."""

    usual_rate: float = 0.05  #: failure rate assumed before anything is known
    strength: float = 60.0  #: shards that must be seen before they weigh as much as what is usual
    node_strength: float = 10.0  #: failures expected on a node before its own record weighs as much
    half_life: timedelta = timedelta(days=7)
    most: float = 0.5  #: largest share of redundant shards


@dataclass(frozen=True, slots=True)
class Redundancy:
    """The share of redundant shards, and why."""

    share: float
    failure_rate: float
    reason: str

    def spares(self, shards: int) -> int:
        """Return the number of redundant shards for a run of ``shards``: a part of one is one."""
        return math.ceil(self.share * shards - 1e-9)


@dataclass(slots=True)
class _Tally:
    """Fading sums; true for the moment ``as_of``."""

    shards: float = 0.0
    failures: float = 0.0
    as_of: datetime | None = None


class FailureHistory:
    """Fading counts of shards and failures. The order in which runs are added changes nothing."""

    def __init__(self, outcomes: Iterable[RunOutcome] = (), policy: RedundancyPolicy | None = None) -> None:
        self._policy = policy or RedundancyPolicy()
        #: by (), (class,) and (class, model); each holds the runs of those below it
        self._tallies: dict[_Key, _Tally] = {}
        #: by (node, class, model): what a node's record is judged against is the rate of what ran on it
        self._on_node: dict[NodeName, dict[_Key, _Tally]] = {}
        for outcome in outcomes:
            self.add(outcome)

    def add(self, outcome: RunOutcome) -> None:
        """Count a finished run; one without shards, or with more failures than shards, is refused."""
        if outcome.shards < 1 or not 0 <= outcome.failures <= outcome.shards:
            raise ValueError(
                f"a run of {outcome.shards} shards with {outcome.failures} failed: "
                "count each shard at most once, and only runs that have shards"
            )
        for key in _levels(outcome.task_class, outcome.model):
            tally = self._tallies.setdefault(key, _Tally())
            self._count(tally, outcome.at, outcome.shards, outcome.failures)
        cell = _levels(outcome.task_class, outcome.model)[-1]
        for node, failures in _by_node(outcome).items():
            tally = self._on_node.setdefault(node, {}).setdefault(cell, _Tally())
            self._count(tally, outcome.at, outcome.shards / len(set(outcome.nodes)), failures)

    def redundancy(
        self,
        task_class: str | None,
        model: str | None,
        nodes: Iterable[NodeName] = (),
        *,
        now: datetime,
    ) -> Redundancy:
        """Return the share for the next run; ``nodes`` may be left out while they are not chosen."""
        levels = _levels(task_class, model)
        known = self._rate(levels[-1], now)
        worse = self._excess(tuple(dict.fromkeys(nodes)), now)
        rate = min(1.0, known * worse)
        share = min(self._policy.most, 2 * rate)
        return Redundancy(share, rate, self._reason(levels, share, rate, worse, now))

    def known(self) -> list[tuple[str | None, str | None]]:
        """Return (class, model) of every level that has runs, the fleet as (None, None) first."""
        return [((*key, None, None)[0], (*key, None, None)[1]) for key in sorted(self._tallies)]

    def excess_of(self, node: NodeName, now: datetime) -> float:
        """Return how much more often shards fail on a node than their kind of run explains; 1 = as usual."""
        expected = failures = self._policy.node_strength
        for cell, tally in self._on_node.get(node, {}).items():
            fade = self._fade(tally.as_of, now)
            expected += tally.shards * fade * self._rate(cell, now)
            failures += tally.failures * fade
        return failures / expected

    # -- counting
    def _count(self, tally: _Tally, at: datetime, shards: float, failures: float) -> None:
        if tally.as_of is None or at > tally.as_of:
            fade = self._fade(tally.as_of, at)
            tally.shards, tally.failures, tally.as_of = tally.shards * fade, tally.failures * fade, at
        weight = self._fade(at, tally.as_of)
        tally.shards += shards * weight
        tally.failures += failures * weight

    def _fade(self, since: datetime | None, now: datetime) -> float:
        if since is None or now <= since:
            return 1.0
        return float(0.5 ** ((now - since) / self._policy.half_life))

    # -- estimating
    def _rate(self, key: _Key, now: datetime, without: _Key | None = None) -> float:
        """Return the rate of a level, its prior being the level above without the runs of this one."""
        shards, failures = self._sums(key, now)
        if without is not None:
            less_shards, less_failures = self._sums(without, now)
            shards, failures = max(0.0, shards - less_shards), max(0.0, failures - less_failures)
        prior = self._policy.usual_rate if not key else self._rate(key[:-1], now, without=key)
        return (failures + self._policy.strength * prior) / (shards + self._policy.strength)

    def _sums(self, key: _Key, now: datetime) -> tuple[float, float]:
        tally = self._tallies.get(key)
        if tally is None:
            return 0.0, 0.0
        fade = self._fade(tally.as_of, now)
        return tally.shards * fade, tally.failures * fade

    def _excess(self, nodes: tuple[NodeName, ...], now: datetime) -> float:
        """Return the mean over the nodes; a good record of a node does not lower the rate of its runs."""
        if not nodes:
            return 1.0
        return max(1.0, sum(self.excess_of(node, now) for node in nodes) / len(nodes))

    def _reason(self, levels: list[_Key], share: float, rate: float, worse: float, now: datetime) -> str:
        what = " on ".join(levels[-1]) or "the fleet"
        shards, failures = self._sums(levels[-1], now)
        days = self._policy.half_life.total_seconds() / _DAY_S
        seen = f"{failures:.3g} of {shards:.3g} shards of {what} failed lately (half-life {days:g} days)"
        if shards < 0.5:
            seen = f"nothing is known yet of {what}, {self._policy.usual_rate:.1%} of failures are usual"
        text = f"{share:.1%} redundant shards for a failure rate of {rate:.1%}: {seen}"
        if shards < self._policy.strength:
            text += ", drawn towards what is known of others"
        if worse > 1.005:
            text += f"; these nodes fail {worse:.2g} times as often as others"
        if share >= self._policy.most:
            text += f"; {self._policy.most:.0%} is the most"
        return text


def _levels(task_class: str | None, model: str | None) -> list[_Key]:
    """Return the keys from the fleet down to what is known of the run; a model alone is no level."""
    levels: list[_Key] = [()]
    if task_class is not None:
        levels.append((task_class,))
        if model is not None:
            levels.append((task_class, model))
    return levels


def _by_node(outcome: RunOutcome) -> dict[NodeName, float]:
    """Return the failures of each node; those whose node is not known are spread over all."""
    nodes = dict.fromkeys(outcome.nodes)
    placed = [node for node in outcome.failed_on if node in nodes][: outcome.failures]
    rest = outcome.failures - len(placed)
    return {node: placed.count(node) + rest / len(nodes) for node in nodes}
