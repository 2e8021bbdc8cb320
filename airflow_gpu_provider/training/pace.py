"""How fast the shards of a run are, and which of them keeps the others waiting.

Pure. In a run that synchronises, all shards make as many steps a second as the slowest; so it is judged by
the time a shard computes for a step, without what it waits for others: the straggler is the one that waits
least. Each shard's time is set against the median of the others in the same second, and the median of the
last seconds decides, so that neither one slow step nor a machine that is slow for all names anyone. Next:
`observer` tells people.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from pydantic import BaseModel

_SAMPLE_S = 1.0
_SAMPLES_KEPT = 7
_SAMPLES_NEEDED = 4
#: times the others' median, from which a shard is called a straggler, and below which no longer
_SLOW, _FAST_AGAIN = 1.3, 1.15
#: below this no one would notice, and clocks decide
_LEAST_DIFFERENCE_S = 0.0005


class Counters(BaseModel):
    """What one process has done since it began, told with its heartbeats; steps done again count again."""

    steps: int = 0
    own_s: float = 0.0  #: spent on its own work
    shared_s: float = 0.0  #: spent in synchronisations, most of it waiting where another shard is slow
    collectives: int = 0
    collective_s: float = 0.0
    size_bytes: int = 0  #: of the buffers that were reduced
    samples: int | None = None  #: None: the author does not report them
    loss: float | None = None  #: the newest that was read
    gradient_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """What happened between two looks."""

    seconds: float
    steps: float
    own_s: Mapping[int, float]  #: by rank, for a step
    waiting: Mapping[int, float]  #: by rank, part of its time
    samples_per_s: float | None
    collective_s: float | None  #: for each, at the shard that came last and so waited for no one
    bytes_per_s: float
    bus_bytes_per_s: float | None  #: comparable between numbers of shards: algorithm bandwidth x 2(n-1)/n


@dataclass(frozen=True, slots=True)
class Slowest:
    """The shard that takes longest, beside the median of the others."""

    rank: int
    own_s: float
    others_s: float
    factor: float


class Paces:
    """What is known of all shards' speed."""

    def __init__(self) -> None:
        self._holders: dict[int, str] = {}
        self._before: dict[int, Counters] = {}
        self._at = 0.0
        self._recent: deque[Mapping[int, float]] = deque(maxlen=_SAMPLES_KEPT)
        self.straggler: Slowest | None = None

    def take(
        self, counters: Mapping[int, Counters], *, holders: Mapping[int, str], now: float
    ) -> Sample | None:
        """Take the shards' counters by rank; return what happened since the last sample, if it is time."""
        if dict(holders) != self._holders or counters.keys() != self._before.keys():
            self._begin(counters, holders, now)
            return None
        if now - self._at < _SAMPLE_S or any(
            counters[rank].steps <= before.steps for rank, before in self._before.items()
        ):
            return None
        sample = between(self._before, counters, seconds=now - self._at, shards=len(counters))
        self._before, self._at = dict(counters), now
        self._recent.append(sample.own_s)
        self._judge()
        return sample

    def _begin(self, counters: Mapping[int, Counters], holders: Mapping[int, str], now: float) -> None:
        """Forget all: after a takeover the same rank computes on another device."""
        self._holders, self._before, self._at = dict(holders), dict(counters), now
        self._recent.clear()
        self.straggler = None

    def _judge(self) -> None:
        if len(self._recent) < _SAMPLES_NEEDED or len(self._holders) < 2:
            return
        slowest = slowest_of(self._recent)
        was = self.straggler is not None and self.straggler.rank == slowest.rank
        is_slow = slowest.factor >= (_FAST_AGAIN if was else _SLOW)
        is_felt = slowest.own_s - slowest.others_s >= _LEAST_DIFFERENCE_S
        self.straggler = slowest if is_slow and is_felt else None


def slowest_of(recent: Sequence[Mapping[int, float]]) -> Slowest:
    """Return the rank whose time for a step, over the others' median at the same time, is usually largest."""
    found = []
    for rank in recent[-1]:
        others = [median(own for other, own in sample.items() if other != rank) for sample in recent]
        pairs = [
            (sample[rank] / max(other, 1e-9), sample[rank], other)
            for sample, other in zip(recent, others, strict=True)
        ]
        factor, own, other = median_low(pairs)
        found.append(Slowest(rank, own, other, factor))
    return max(found, key=lambda each: each.factor)


def between(
    before: Mapping[int, Counters], after: Mapping[int, Counters], *, seconds: float, shards: int
) -> Sample:
    """Return what happened between two looks at some ranks, each of which has made steps since."""
    own_s, waiting = {}, {}
    collective_s: list[float] = []
    for rank, now in after.items():
        then = before[rank]
        own, shared = now.own_s - then.own_s, now.shared_s - then.shared_s
        own_s[rank] = own / (now.steps - then.steps)
        waiting[rank] = shared / (own + shared) if own + shared > 0 else 0.0
        if now.collectives > then.collectives:
            collective_s.append((now.collective_s - then.collective_s) / (now.collectives - then.collectives))
    size = max(now.size_bytes - before[rank].size_bytes for rank, now in after.items())
    rounds = max(now.collectives - before[rank].collectives for rank, now in after.items())
    quickest = min(collective_s, default=None)
    bus = None
    if quickest and rounds and shards > 1:
        bus = size / rounds / quickest * 2 * (shards - 1) / shards
    return Sample(
        seconds=seconds,
        steps=median(now.steps - before[rank].steps for rank, now in after.items()),
        own_s=own_s,
        waiting=waiting,
        samples_per_s=samples_between(before, after, seconds),
        collective_s=quickest,
        bytes_per_s=size / seconds,
        bus_bytes_per_s=bus,
    )


def samples_between(
    before: Mapping[int, Counters], after: Mapping[int, Counters], seconds: float
) -> float | None:
    """Return how many samples a second were trained on, None where the author does not report them."""
    counts = [
        now.samples - (before[rank].samples or 0) for rank, now in after.items() if now.samples is not None
    ]
    return sum(counts) / seconds if counts else None
